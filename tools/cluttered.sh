#!/usr/bin/env bash
# Runs a command as on a machine that was used for other things. None of them may change the result of a test.
#
#   tools/cluttered.sh COMMAND [ARGUMENT..]
#
# A separate mount namespace has broken files of a Kubernetes node in /etc, /var/lib and /opt, a hosts file without names, and a
# home folder with only configurations of ssh, git, curl and kubectl that lead nowhere. The environment names proxies that do not
# exist, another language, a KUBECONFIG, and a folder for temporary files with a blank in its name. New files are private. Rust,
# Go's modules and our cache are unchanged.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
  [ $# -gt 0 ] || { echo "usage: tools/cluttered.sh COMMAND [ARGUMENT..]" >&2; exit 2; }
  map=(); [ "$(id -u)" = 0 ] || map=(--map-root-user)
  exec unshare --mount --propagation private "${map[@]}" "$0" --inside "$@"
fi
shift

export CARGO_HOME=${CARGO_HOME:-$HOME/.cargo} RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
export FIRSTLIGHT_CACHE=${FIRSTLIGHT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/firstlight}
export GOPATH=${GOPATH:-$HOME/go} GOCACHE=${GOCACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/go-build}
clutter=/mnt # only of this namespace
mount -t tmpfs clutter "$clutter"

for folder in etc opt var/lib; do
  mkdir -p "$clutter/$folder/upper" "$clutter/$folder/work"
  mount -t overlay -o "lowerdir=/$folder,upperdir=$clutter/$folder/upper,workdir=$clutter/$folder/work" overlay "/$folder"
done
for file in /etc/kubernetes/{admin.conf,kubelet.conf,audit-policy.yaml,pki/ca.{crt,key},pki/etcd/ca.key,manifests/etcd.yaml} \
  /var/lib/kubelet/{config.yaml,pki/kubelet.crt} /var/lib/etcd/member/wal /opt/cni/bin/bridge \
  /etc/ssh/{ssh_host_ed25519_key,ssh_ca.pub} /etc/systemd/system/kubelet.service; do
  mkdir -p "$(dirname "$file")"; echo "this is somebody else's" >"$file"
done
echo "192.0.2.1 somewhere-else" >/etc/hosts

export HOME=$clutter/home TMPDIR="$clutter/temporary files" KUBECONFIG=$clutter/home/.kube/config
mkdir -p "$HOME"/{.kube,.ssh,.docker} "$TMPDIR"
echo "this is no kubeconfig" >"$KUBECONFIG"
printf 'Host *\n  ProxyCommand false\n' | tee "$HOME/.ssh/config" >/etc/ssh/ssh_config
printf '[core]\n  autocrlf = true\n  quotePath = false\n[safe]\n  directory = /nowhere\n' >"$HOME/.gitconfig"
echo "proxy = http://127.0.0.1:9" >"$HOME/.curlrc"
for name in http_proxy https_proxy all_proxy; do export $name=http://127.0.0.1:9 "${name^^}=http://127.0.0.1:9"; done
unset no_proxy NO_PROXY
export LANG=de_DE.UTF-8 LANGUAGE=de TZ=Asia/Kathmandu CDPATH=/:/tmp GREP_COLORS=always LESSOPEN='|false'
umask 077
exec "$@"
