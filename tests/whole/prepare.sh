#!/usr/bin/env bash
# Makes everything that the test needs and that comes through the network: the image of the machines and a newer version of it, the CNI
# plugins, Helm, the programs of the registry, and the container images of two versions of Kubernetes. Prints the archives of the
# container images, one a line.
. "$(dirname "$0")/../../tools/lib.sh"
cd "$ROOT"

tools/mkosi.sh kubernetes >/dev/null
VERSION=100.1 OUT=$ROOT/target/mkosi/kubernetes-next KEY=$(tests/whole/keys.sh)/maker tools/mkosi.sh kubernetes >/dev/null
tools/cni-plugins.sh >/dev/null
tools/helm.sh >/dev/null
tools/registry.sh >/dev/null
# kube-proxy and flannel call iptables and nft
debian=$(mktemp -d); trap 'rm -rf "$debian"' EXIT
tar x -C "$debian" -f "$(tools/node-image.sh debian)"
older=$(KUBERNETES_VERSION=v1.35.4 tools/kubernetes-images.sh "$debian")
ls "$older"/*.tar "$(tools/kubernetes-images.sh "$debian")"/*.tar "$(tools/flannel.sh "$debian")/image.tar" "$ROOT/target/dist/firstlight-image.tar"
