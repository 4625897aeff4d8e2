{{- define "lmc.name" -}}
{{- if contains "lmc" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-lmc" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "lmc.selector" -}}
app.kubernetes.io/name: lmc
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmc.labels" -}}
{{ include "lmc.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "lmc.memory" -}}
{{- /* The pool, a 64th of it, and 2 GiB, in MiB: docs/size.md. */ -}}
{{ add (mul .Values.poolGib 1040) 2048 }}Mi
{{- end }}
