{{- /*
The labels of all objects, and what policies have in common. `firstlight apply` reads this file too, so its definitions have no `if`.
Selectors find pods by `k8s-app` only: the selector of a DaemonSet is immutable.
*/}}
{{- define "firstlight.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name | toJson }}
app.kubernetes.io/version: {{ include "firstlight.version" . | toJson }}
app.kubernetes.io/part-of: firstlight
app.kubernetes.io/managed-by: {{ .Release.Service | toJson }}
helm.sh/chart: {{ include "firstlight.chart" . | toJson }}
{{- end }}

{{- define "join-service.labels" -}}
app.kubernetes.io/name: join-service
app.kubernetes.io/component: join-service
{{- include "firstlight.labels" . | nindent 0 }}
{{- end }}

{{- define "key-service.labels" -}}
app.kubernetes.io/name: key-service
app.kubernetes.io/component: key-service
{{- include "firstlight.labels" . | nindent 0 }}
{{- end }}

{{- define "member-controller.labels" -}}
app.kubernetes.io/name: member-controller
app.kubernetes.io/component: member-controller
{{- include "firstlight.labels" . | nindent 0 }}
{{- end }}

{{- define "admission.labels" -}}
app.kubernetes.io/name: admission
app.kubernetes.io/component: admission
{{- include "firstlight.labels" . | nindent 0 }}
{{- end }}

{{- /* The values `podLabels` have the other labels of pods. A changed label restarts the pods, so they have no label with the chart's version. */}}
{{- define "join-service.podLabels" -}}
app.kubernetes.io/name: join-service
app.kubernetes.io/component: join-service
app.kubernetes.io/instance: {{ .Release.Name | toJson }}
app.kubernetes.io/version: {{ include "firstlight.version" . | toJson }}
{{- end }}

{{- define "key-service.podLabels" -}}
app.kubernetes.io/name: key-service
app.kubernetes.io/component: key-service
app.kubernetes.io/instance: {{ .Release.Name | toJson }}
app.kubernetes.io/version: {{ include "firstlight.version" . | toJson }}
{{- end }}

{{- define "member-controller.podLabels" -}}
app.kubernetes.io/name: member-controller
app.kubernetes.io/component: member-controller
app.kubernetes.io/instance: {{ .Release.Name | toJson }}
app.kubernetes.io/version: {{ include "firstlight.version" . | toJson }}
{{- end }}

{{- /*
An update that changes nothing: a migration of the API server's storage writes objects as they are, and the garbage collector removes
finalizers and owners. A policy adds the fields that only its kinds have, and the annotations.
*/}}
{{- define "admission.isSame" -}}
request.operation == "UPDATE" && object.?type == oldObject.?type && object.?immutable == oldObject.?immutable
&& object.?binaryData == oldObject.?binaryData && object.?spec == oldObject.?spec && object.?status == oldObject.?status
&& object.metadata.?labels == oldObject.metadata.?labels
&& object.metadata.?finalizers.orValue([]).all(finalizer, finalizer in oldObject.metadata.?finalizers.orValue([]))
&& object.metadata.?ownerReferences.orValue([]).all(owner, oldObject.metadata.?ownerReferences.orValue([]).exists(old, old.uid == owner.uid))
{{- end }}
