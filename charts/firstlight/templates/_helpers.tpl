{{- /* Parts that need more of Go's template language than `firstlight apply` knows. render.rs computes the first seven itself. */}}

{{- /* The reference of the image: the text in the values, or one made of the fields. With a digest, it has no tag. */}}
{{- define "firstlight.image" -}}
{{- $image := .Values.image }}
{{- if kindIs "string" $image }}
{{- $image }}
{{- else }}
{{- $tag := $image.tag }}
{{- if not (or $tag $image.digest) }}
{{- $tag = .Chart.AppVersion }}
{{- end }}
{{- $image.repository }}
{{- with $tag }}:{{ . }}{{ end }}
{{- with $image.digest }}@{{ . }}{{ end }}
{{- end }}
{{- end }}

{{- define "firstlight.imagePullPolicy" -}}
{{- if kindIs "string" .Values.image }}IfNotPresent{{ else }}{{ .Values.image.pullPolicy }}{{ end }}
{{- end }}

{{- /* A version may have a plus sign, but a label may not. */}}
{{- define "firstlight.version" -}}
{{- .Chart.AppVersion | replace "+" "_" }}
{{- end }}

{{- define "firstlight.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "firstlight.policy" -}}
{{- if kindIs "string" .Values.attestationPolicy }}{{ .Values.attestationPolicy }}{{ else }}{{ .Values.attestationPolicy | toJson }}{{ end }}
{{- end }}

{{- /* The name of the Secret with the master secret. It has a hash of the content, because the Secret is immutable. */}}
{{- define "firstlight.masterSecret" -}}
{{- with .Values.masterSecret.existingSecret }}{{ . }}{{ else -}}
{{- printf "firstlight-mastersecret-%s" (sha256sum .Values.masterSecret.encrypted | trunc 8) }}
{{- end }}
{{- end }}

{{- define "firstlight.masterSecretData" -}}
{{- .Values.masterSecret.encrypted | b64enc }}
{{- end }}

{{- define "firstlight.metrics.labels" -}}
app.kubernetes.io/name: firstlight
app.kubernetes.io/component: metrics
{{- include "firstlight.labels" . | nindent 0 }}
{{- end }}
