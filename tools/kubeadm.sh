#!/usr/bin/env bash
# Tests our kubeadm configurations, and the kubelet's certificate, with the real kubeadm of the tests' cluster, of its upgrade, and of
# the newest supported version. The kubeadm of the tests' cluster must also find a real API server of the cluster that it joins, and the
# checks of its Kubernetes must accept each of 2000 generated sets of parameters that `init` accepts. They are built from the Go module
# proxy (tools/kubernetes.sh; minutes the first time).
#
#   tools/kubeadm.sh [VERSION..]
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
# not every release is published as Go modules; from v1.31 to v1.33 no release is complete
[ $# -gt 0 ] || set -- v1.34.4 v1.35.4 v1.36.3 v1.37.2
for version; do
  folder=$(KUBERNETES_VERSION=$version tools/kubernetes.sh kubeadm)
  say "kubeadm $version"
  FIRSTLIGHT_KUBEADM=$folder/bin/kubeadm cargo test --locked --quiet --lib -- --ignored real_kubeadm
done
# with the API server of the same version
kubeadm=$(tools/kubernetes.sh kubeadm)/bin/kubeadm
FIRSTLIGHT_KUBEADM=$kubeadm cargo test --locked --quiet --test kubernetes_join -- --ignored
FIRSTLIGHT_CHECK_PARAMETERS=$(tools/kubernetes.sh check-parameters)/bin/check-parameters \
  cargo test --locked --quiet -p firstlight-kubernetes --lib -- --ignored --nocapture kubernetes_itself
