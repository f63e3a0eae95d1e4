{{- /* Words that several templates share. A role is prefill or decode. */ -}}

{{- define "kvferry.name" -}}
{{ .Release.Name }}-{{ .role }}
{{- end }}

{{- define "kvferry.labels" -}}
app.kubernetes.io/name: {{ .role }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: kvferry
{{- end }}

{{- /* Where pod N of a role is reached. */ -}}
{{- define "kvferry.podName" -}}
{{ include "kvferry.name" . }}-{{ .pod }}.{{ include "kvferry.name" . }}-peers
{{- end }}

{{- define "kvferry.engineImage" -}}
{{- $run := eq .Values.gpu.mode "container" -}}
{{- default (ternary (printf "%s-kvferry:run" .Values.engine.kind) "" $run) .Values.images.engine | default (index (dict "vllm" "vllm-kvferry:v0.32.0" "sglang" "sglang-kvferry:v0.5.23") .Values.engine.kind) -}}
{{- end }}

{{- /* An engine in one container with its daemons: they drain, it ends, they drain what it has left. */ -}}
{{- define "kvferry.grace" -}}
{{- $s := .Values.shutdown -}}
{{- if eq .Values.gpu.mode "container" }}{{ add $s.leave $s.drain $s.engine $s.drain 25 }}{{ else }}{{ add (max (add $s.leave $s.drain) (add $s.leave $s.engine)) $s.drainAtExit 25 }}{{ end -}}
{{- end }}

{{- define "kvferry.socket" -}}
{{- if eq .Values.gpu.mode "node" -}}
/run/kvferry/{gpu_uuid}.sock
{{- else if and (eq (int .Values.ranksPerPod) 1) (eq (int .Values.nodes) 1) -}}
/run/kvferry/engine.sock
{{- else -}}
/run/kvferry/engine-{{ .rank }}.sock
{{- end }}
{{- end }}

{{- /* Daemons of a pod: by their number they have ports. */ -}}
{{- define "kvferry.daemons" -}}
{{ ternary .Values.node.gpus .Values.ranksPerPod (eq .Values.gpu.mode "node") }}
{{- end }}

{{- /* Settings that daemons have wherever they run. rank: of the first of them. */ -}}
{{- define "kvferry.settings" -}}
{{- $rest := add 7410 (mul 10 .rank) -}}
{{- $peer := add 7411 (mul 10 .rank) -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- {name: KVFERRY_REST, value: "*:{{ $rest }}"}
- {name: KVFERRY_TOKEN_FILE, value: /etc/kvferry/token/token}
- {name: KVFERRY_PEER, value: "*:{{ $peer }}"}
{{- if .Values.tls.enabled }}
# No certificate knows the address of a pod to come: pods are advertised by name, and a wildcard covers the names.
- {name: KVFERRY_ADVERTISE, value: "$(POD_NAME).{{ include "kvferry.name" . }}-peers.$(POD_NAMESPACE).svc:{{ $peer }}"}
- {name: KVFERRY_TLS_CERT, value: /etc/kvferry/tls/tls.crt}
- {name: KVFERRY_TLS_KEY, value: /etc/kvferry/tls/tls.key}
- {name: KVFERRY_TLS_CA, value: /etc/kvferry/tls/ca.crt}
{{- else }}
- {name: KVFERRY_ADVERTISE, value: "[$(POD_IP)]:{{ $peer }}"}
- {name: KVFERRY_PEER_SECRET_FILE, value: /etc/kvferry/peers/secret}
{{- end }}
- {name: KVFERRY_ALLOW_PEERS, value: "{{ .Values.podNetwork }},*.{{ .Release.Namespace }}.svc"}
{{- if eq .role "decode" }}
# Every prefill engine is met before its first request.
{{- $prefill := dict "Values" .Values "Release" .Release "role" "prefill" }}
{{- if .Values.tls.enabled }}
{{- $pods := list }}
{{- range $pod := until (int .Values.prefill.replicas) }}
{{- $pods = append $pods (printf "%s.$(POD_NAMESPACE).svc:7411" (include "kvferry.podName" (merge (dict "pod" $pod) $prefill))) }}
{{- end }}
- {name: KVFERRY_KNOWN_PEERS, value: "{{ join "," $pods }}"}
{{- else }}
- {name: KVFERRY_KNOWN_PEERS, value: "{{ include "kvferry.name" $prefill }}-peers:7411"}
{{- end }}
{{- end }}
# vLLM reserves the blocks that are written: no order need name any.
- {name: KVFERRY_ORDER_TABLES, value: "false"}
{{- $ports := printf "TCP_PORT_RANGE=%d-%d" (int .Values.ucxPorts.first) (int .Values.ucxPorts.last) }}
{{- if .Values.rdma.enabled }}
# No tcp: UCX would take it without a word where RDMA does not come up.
- {name: KVFERRY_UCX, value: "TLS={{ .Values.rdma.tls }} {{ $ports }}"}
- {name: KVFERRY_REQUIRE_RDMA, value: "true"}
{{- else }}
- {name: KVFERRY_UCX, value: "{{ $ports }}"}
{{- end }}
{{- end }}

{{- /* Before an engine's own command. */ -}}
{{- define "kvferry.run" -}}
{{- if eq .Values.gpu.mode "container" }}kvferry, run, --engine-stop-s={{ .Values.shutdown.engine }}, --, {{ end }}
{{- end }}

{{- /* The daemon of one rank of a pod: a native sidecar. */ -}}
{{- define "kvferry.daemon" -}}
{{- $rest := add 7410 (mul 10 .rank) -}}
{{- $peer := add 7411 (mul 10 .rank) -}}
{{- $suffix := ternary "" (printf "-%d" .rank) (eq .rank 0) -}}
{{- $multi := or (gt (int .Values.ranksPerPod) 1) (gt (int .Values.nodes) 1) -}}
- name: kvferry{{ $suffix }}
  # Up before the engine starts, ended after the engine has ended.
  restartPolicy: Always
  image: {{ .Values.images.daemon }}
  args: [keep]
  env:
    {{- include "kvferry.settings" . | nindent 4 }}
    {{- if gt (int .Values.nodes) 1 }}
    - {name: KVFERRY_ROSTER, value: "{{ include "kvferry.podName" (merge (dict "pod" 0) .) }}.$(POD_NAMESPACE).svc:7411"}
    {{- else if $multi }}
    - {name: KVFERRY_ROSTER, value: "[$(POD_IP)]:7411"}
    {{- end }}
    - {name: KVFERRY_ENGINE_SOCKET, value: {{ include "kvferry.socket" . }}}
    - {name: KVFERRY_DEVICE, value: "{{ ternary "cpu" (printf "cuda:%d" .rank) (eq .Values.gpu.mode "none") }}"}
    {{- if eq .Values.gpu.mode "runtimeClass" }}
    - {name: NVIDIA_VISIBLE_DEVICES, value: "{{ include "kvferry.gpus" . }}"}
    {{- end }}
    - {name: KVFERRY_DRAIN_TIMEOUT_S, value: "{{ .Values.shutdown.drainAtExit }}"}
    - {name: TRITON_CACHE_DIR, value: /tmp/triton{{ $suffix }}}
    {{- range $name, $value := .Values.daemonEnv }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
  ports:
    - {name: rest{{ $suffix }}, containerPort: {{ $rest }}}
    - {name: peer{{ $suffix }}, containerPort: {{ $peer }}}
  # Only /healthz may be asked here. The kubelet starts the engine when the sidecar's startup probe has succeeded, and /readyz
  # says yes when the engine has registered its cache: each would wait for the other for ever.
  startupProbe:
    httpGet: {path: /healthz, port: rest{{ $suffix }}}
    periodSeconds: 2
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /healthz, port: rest{{ $suffix }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /readyz, port: rest{{ $suffix }}}
    periodSeconds: 5
    timeoutSeconds: 5
  lifecycle:
    preStop:
      exec:
        command: [sh, -c, "sleep {{ .Values.shutdown.leave }}; kvferry drain --wait {{ .Values.shutdown.drain }}"]
  resources:
    {{- $resources := deepCopy .Values.resources.daemon }}
    {{- if .Values.rdma.enabled }}
    {{- $_ := set $resources "limits" (merge (dict .Values.rdma.resource "1") ($resources.limits | default dict)) }}
    {{- end }}
    {{- if eq .Values.gpu.mode "dra" }}
    {{- $_ := set $resources "claims" (list (dict "name" "gpu")) }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      {{- if and .Values.rdma.enabled (not .Values.rdma.memlockUnlimited) }}
      add: [IPC_LOCK]
      {{- end }}
  volumeMounts:
    - {name: kvferry, mountPath: /run/kvferry}
    - {name: token, mountPath: /etc/kvferry/token, readOnly: true}
    - {name: daemon-tmp, mountPath: /tmp}
    {{- if .Values.tls.enabled }}
    - {name: tls, mountPath: /etc/kvferry/tls, readOnly: true}
    {{- else }}
    - {name: peers, mountPath: /etc/kvferry/peers, readOnly: true}
    {{- end }}
{{- end }}

{{- define "kvferry.gpus" -}}
{{- $gpus := list -}}
{{- range $i := until (int .Values.ranksPerPod) -}}
{{- $gpus = append $gpus $i -}}
{{- end -}}
{{- join "," $gpus -}}
{{- end }}

{{- /* What a pod's spec has of pods.engine or pods.proxy. With `reserved` (gpu.mode runtimeClass) its nodes are kept for kvferry. */ -}}
{{- define "kvferry.scheduling" -}}
{{- $selector := deepCopy .pod.nodeSelector -}}
{{- $tolerations := .pod.tolerations -}}
{{- $affinity := deepCopy .pod.affinity -}}
{{- if .gpu -}}
{{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists") -}}
{{- end -}}
{{- if .reserved -}}
{{- $_ := set $selector "kvferry.io/gpu" "true" -}}
{{- $tolerations = append $tolerations (dict "key" "kvferry.io/gpu" "operator" "Exists") -}}
{{- $anti := deepCopy (default dict $affinity.podAntiAffinity) -}}
{{- $labels := dict "matchLabels" (dict "app.kubernetes.io/part-of" "kvferry") -}}
{{- $alone := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $labels -}}
{{- $rules := append (default list $anti.requiredDuringSchedulingIgnoredDuringExecution) $alone -}}
{{- $_ := set $anti "requiredDuringSchedulingIgnoredDuringExecution" $rules -}}
{{- $_ := set $affinity "podAntiAffinity" $anti -}}
{{- end -}}
{{- with $selector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
