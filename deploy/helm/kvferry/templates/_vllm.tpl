{{- /* What vLLM is started with. */ -}}
{{- define "kvferry.vllm" -}}
{{- if gt (int .Values.nodes) 1 }}
# vLLM's API server runs on the first node; the others have none to ask.
command:
  - sh
  - -c
  - |
    [ "$POD_INDEX" = 0 ] || set -- "$@" --headless
    exec vllm serve {{ .Values.model }} "$@"
  - vllm
{{- else }}
command: [{{ include "kvferry.run" . }}vllm, serve, {{ .Values.model }}]
{{- end }}
args:
  - --port={{ .port }}
  {{- if .Values.ipv6 }}
  - "--host=::"
  {{- end }}
  - --gpu-memory-utilization=0.85
  - --shutdown-timeout={{ .Values.shutdown.engine }}
  - --middleware=kvferry.asgi.CheckTransferParams
  {{- $ranks := mul (int .Values.ranksPerPod) (int .Values.nodes) }}
  {{- if gt $ranks 1 }}
  - --tensor-parallel-size={{ $ranks }}
  {{- end }}
  {{- if gt (int .Values.nodes) 1 }}
  - --nnodes={{ .Values.nodes }}
  - --node-rank=$(POD_INDEX)
  - --master-addr={{ include "kvferry.podName" (merge (dict "pod" 0) .) }}
  {{- end }}
  {{- range .Values.engine.args }}
  - {{ . | quote }}
  {{- end }}
  {{- $transfer := dict "kv_connector" "KvferryConnector" "kv_connector_module_path" "kvferry.vllm" "kv_role" "kv_both" }}
  {{- $_ := set $transfer "kv_connector_extra_config" (dict "socket" (include "kvferry.socket" (merge (dict "rank" "{local_rank}") .))) }}
  {{- if gt (int .Values.nodes) 1 }}{{ $_ := set $transfer "engine_id" (include "kvferry.name" .) }}{{ end }}
  - {{ printf "--kv-transfer-config=%s" (toJson $transfer) | squote }}
{{- end }}
