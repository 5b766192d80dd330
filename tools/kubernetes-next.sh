#!/usr/bin/env bash
# Builds the next minor release of Kubernetes for a test of an upgrade, and makes its container images.
#
#   tools/kubernetes-next.sh      prints the folder of the images (tools/kubernetes-images.sh); the programs are in ../bin
. "$(dirname "$0")/lib.sh"

# a release of the minor version after that of tools/kubernetes.sh
export KUBERNETES_VERSION=v1.35.4
"$ROOT/tools/kubernetes.sh" >/dev/null

# the Debian packages for kube-proxy's image
debian=$(ls "$CACHE"/node-debian-*.tar 2>/dev/null) || die "there is no Debian of a node: run tools/node-image.sh"
root=$(mktemp -d); trap 'rm -rf "$root"' EXIT
tar x -C "$root" -f "$debian"
"$ROOT/tools/kubernetes-images.sh" "$root"
