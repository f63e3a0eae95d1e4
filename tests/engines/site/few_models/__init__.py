"""SGLANG_EXTERNAL_MODEL_PACKAGE: in its place SGLang imports 200 model files at every start, a quarter of a minute."""
