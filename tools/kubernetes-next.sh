#!/usr/bin/env bash
# Builds the release of Kubernetes to which a test upgrades a cluster, the default of tools/kubernetes.sh, and makes its container
# images.
#
#   tools/kubernetes-next.sh      prints the folder of the images (tools/kubernetes-images.sh); the programs are in ../bin
. "$(dirname "$0")/lib.sh"

# that of the cluster before
unset KUBERNETES_VERSION
"$ROOT/tools/kubernetes.sh" >/dev/null

# the Debian packages for kube-proxy's image
debian=$(ls "$CACHE"/node-debian-*.tar 2>/dev/null) || die "there is no Debian of a node: run tools/node-image.sh"
root=$(mktemp -d); trap 'rm -rf "$root"' EXIT
tar x -C "$root" -f "$debian"
"$ROOT/tools/kubernetes-images.sh" "$root"
