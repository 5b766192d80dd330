#!/usr/bin/env bash
# Makes the next patch release of Kubernetes for a test of an upgrade, and its container images. It links the sources of the present
# release with another version number. They are compiled already, so this takes a minute.
#
#   tools/kubernetes-next.sh      prints the folder of the images (tools/kubernetes-images.sh); the programs are in ../bin
. "$(dirname "$0")/lib.sh"

kubernetes=$("$ROOT/tools/kubernetes.sh")
KUBERNETES_SOURCE=v${kubernetes##*-v}
KUBERNETES_VERSION=${KUBERNETES_SOURCE%.*}.$((${KUBERNETES_SOURCE##*.} + 1))
export KUBERNETES_SOURCE KUBERNETES_VERSION
"$ROOT/tools/kubernetes.sh" >/dev/null

# the Debian packages for kube-proxy's image
debian=$(ls "$CACHE"/node-debian-*.tar 2>/dev/null) || die "there is no Debian of a node: run tools/node-image.sh"
root=$(mktemp -d); trap 'rm -rf "$root"' EXIT
tar x -C "$root" -f "$debian"
"$ROOT/tools/kubernetes-images.sh" "$root"
