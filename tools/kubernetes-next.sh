#!/usr/bin/env bash
# Makes the next patch release of Kubernetes for a test of an upgrade, and its container images: the sources of the present one,
# linked with another version. Compiled they are already, so it takes a minute.
#
#   tools/kubernetes-next.sh      prints the folder of the images (tools/kubernetes-images.sh); the programs are in ../bin
. "$(dirname "$0")/lib.sh"

kubernetes=$("$ROOT/tools/kubernetes.sh")
KUBERNETES_SOURCE=v${kubernetes##*-v}
KUBERNETES_VERSION=${KUBERNETES_SOURCE%.*}.$((${KUBERNETES_SOURCE##*.} + 1))
export KUBERNETES_SOURCE KUBERNETES_VERSION
"$ROOT/tools/kubernetes.sh" >/dev/null

# what kube-proxy's image needs of Debian
debian=$(ls "$CACHE"/node-debian-*.tar 2>/dev/null) || die "there is no Debian of a node: run tools/node-image.sh"
root=$(mktemp -d); trap 'rm -rf "$root"' EXIT
tar x -C "$root" -f "$debian"
"$ROOT/tools/kubernetes-images.sh" "$root"
