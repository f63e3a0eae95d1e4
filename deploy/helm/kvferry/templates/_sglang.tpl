{{- /* What SGLang is started with. */ -}}
{{- define "kvferry.sglang" -}}
command: [{{ include "kvferry.run" . }}python3, -m, sglang.launch_server]
args:
  - --model-path={{ .Values.model }}
  - --host=0.0.0.0
  - --port={{ .port }}
  - --enable-metrics
  - --disaggregation-mode={{ .role }}
  - --disaggregation-transfer-backend=kvferry
  {{- if eq .role "prefill" }}
  - --disaggregation-bootstrap-port=8998
  {{- end }}
  {{- if eq .Values.gpu.mode "none" }}
  - --device=cpu
  {{- else }}
  - --mem-fraction-static=0.85
  {{- end }}
  {{- if gt (int .Values.ranksPerPod) 1 }}
  - --tp-size={{ .Values.ranksPerPod }}
  {{- end }}
  {{- range .Values.engine.args }}
  - {{ . | quote }}
  {{- end }}
{{- end }}
