#!/usr/bin/env bash
# What we tell kubeadm, and the kubelet's certificate, against the real kubeadm of the oldest, a middle and the newest
# supported version, each built from the Go module proxy (tools/kubernetes.sh; minutes the first time).
#
#   tools/kubeadm.sh [VERSION..]
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[ $# -gt 0 ] || set -- v1.31.13 v1.34.4 v1.36.3
for version; do
  folder=$(KUBERNETES_VERSION=$version tools/kubernetes.sh kubeadm)
  say "kubeadm $version"
  FIRSTLIGHT_KUBEADM=$folder/bin/kubeadm cargo test --locked --quiet --lib -- --ignored real_kubeadm
done
