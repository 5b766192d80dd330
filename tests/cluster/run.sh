#!/usr/bin/env bash
# A real cluster of one node, made by kubeadm, without network and registry; ends well when the node is Ready, every pod of
# kube-system runs, and kubectl works from outside of the node. Prints what it took.
#
#   tests/cluster/run.sh [native|qemu]     native (the default): namespaces of this machine; qemu: a virtual machine
#
# SMP, MEM (MiB) size the virtual machine. Consoles and journals are kept in target/cluster. KEEP=1 leaves the node running
# until a key is pressed. Needs root.
. "$(dirname "$0")/../../tools/lib.sh"
[ "$(id -u)" = 0 ] || die "a node needs root"
here=$ROOT/tests/cluster
form=${1:-native}
logs=$ROOT/target/cluster/$form
image=$("$ROOT/tools/node-image.sh")
kubernetes=$("$ROOT/tools/kubernetes.sh" kubeadm kubectl)
version=v${kubernetes##*-v}

rm -rf "$logs"; mkdir -p "$logs"
work=$(mktemp -d "$CACHE/cluster.XXXX")
finish() {
  local status=$?
  trap - EXIT
  trap '' PIPE INT TERM
  if [ $status != 0 ]; then
    say "the run failed; what the node says is in $logs"
    kubectl get nodes,pods -A -o wide >"$logs/state" 2>&1 || true
    ask 'journalctl --no-pager -o short-monotonic' 60 >"$logs/journal" 2>/dev/null || true
    ask 'cd /var/log/pods 2>/dev/null && tail -n 50 */*/*.log' 60 >"$logs/pods" 2>/dev/null || true
  fi
  if [ -n "${node:-}" ]; then kill "$node" 2>/dev/null || true; wait "$node" 2>/dev/null || true; fi
  rm -rf "$work"
  exit $status
}
trap finish EXIT
trap 'exit 1' INT TERM
kubectl() { "$kubernetes/bin/kubectl" --kubeconfig "$work/kubeconfig" --server "$server" --request-timeout 30s "$@"; }

begin=${EPOCHREALTIME/./}
lap() { printf '%8.1f s  %s\n' "$(((${EPOCHREALTIME/./} - begin) / 1000))e-3" "$*"; }

# ---- the two forms of a node: start; ask 'COMMANDS' [SECONDS], as root in the node; put FILE PATH; memory
case $form in
native)
  # one /30 for each run that may be going on
  subnet=10.99.$((BASHPID % 256)).$((BASHPID / 256 % 64 * 4))
  address=${subnet%.*}.$((${subnet##*.} + 2)) gateway=${subnet%.*}.$((${subnet##*.} + 1))
  server=https://$address:6443
  start() {
    "$here/native.sh" "$work" "$work/disk" "$address" "$gateway" >"$logs/console" 2>&1 & node=$!
    until [ -e "$work/pid" ]; do kill -0 "$node" || die "the node did not start: $(cat "$logs/console")"; sleep 0.1; done
    until ask 'systemctl is-system-running | grep -qE "running|degraded"' 10 2>/dev/null; do
      kill -0 "$node" || die "the node ended: $(cat "$logs/console")"; sleep 0.2
    done
  }
  # (started in /, since our working directory does not exist in there)
  ask() { (cd / && timeout -k 1 "${2:-120}" nsenter --target "$(cat "$work/pid")" --all sh -c "$1" </dev/null); }
  put() { cp "$1" "/proc/$(cat "$work/pid")/root$2"; }
  memory() {
    # of the processes in its cgroup, shared pages by their share
    local group total=0
    for group in $(grep -ls "/fl$node/" /proc/[0-9]*/cgroup); do
      total=$((total + $(awk '/^Pss:/{print $2}' "${group%cgroup}smaps_rollup" 2>/dev/null || true) + 0))
    done
    echo $((total / 1024))
  }
  ;;
qemu)
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  server=https://127.0.0.1:$port
  start() {
    # shellcheck disable=SC2046
    nice -n 10 qemu-system-x86_64 $("$ROOT/tools/accel.sh") -M q35 -m "${MEM:-4096}" -smp "${SMP:-2}" \
      -nodefaults -no-reboot -display none -serial "file:$logs/console" -kernel "$image/vmlinuz" -initrd "$image/initrd" \
      -append "console=ttyS0 panic=-1 quiet no_timer_check systemd.show_status=1" \
      -drive "if=none,id=d,file=$work/disk,format=raw,cache=unsafe" -device virtio-blk-pci,drive=d \
      -netdev "user,id=n,hostfwd=tcp:127.0.0.1:$port-:6443" -device virtio-net-pci,netdev=n,romfile= \
      -device virtio-rng-pci -device virtio-serial-pci -chardev "socket,id=s,path=$work/shell,server=on,wait=off" \
      -device virtserialport,chardev=s,name=shell </dev/null & node=$!
    until [ -S "$work/shell" ]; do kill -0 "$node" || die "QEMU did not start"; sleep 0.1; done
    coproc SHELL_ { exec socat - "UNIX-CONNECT:$work/shell,retry=20,interval=0.2"; }
    exec {to}>&"${SHELL_[1]}" {from}<&"${SHELL_[0]}"
    # written before there is a reader, a line waits in the port or is lost
    local try
    for try in $(seq 120); do ! ask true 5 >/dev/null 2>&1 || break; kill -0 "$node" || die "QEMU ended"; done
    ask 'until systemctl is-system-running | grep -qE "running|degraded"; do sleep 1; done' 300
  }
  ask() {
    local line mark=done$RANDOM$RANDOM deadline=$((SECONDS + ${2:-120}))
    printf '{ %s\n} </dev/null 2>&1; r=$?; echo; echo %s $r\n' "$1" "$mark" >&"$to"
    while [ $SECONDS -lt $deadline ]; do
      IFS= read -r -t 1 line <&"$from" || continue
      case $line in "$mark "*) return "${line#"$mark "}" ;; esac
      printf '%s\n' "$line"
    done
    return 124
  }
  put() { ask "echo $(base64 -w0 <"$1") | base64 -d >$2"; }
  memory() { ask "awk '/^MemTotal/{t=\$2}/^MemAvailable/{a=\$2}END{print int((t-a)/1024)}' /proc/meminfo" | sed '/^$/d'; }
  ;;
*) die "usage: tests/cluster/run.sh [native|qemu]" ;;
esac

# ---- the run
cp --sparse=always "$image/disk.img" "$work/disk"
lap "the disk is copied"
start
lap "systemd is up"
sed "s/@VERSION@/$version/" "$here/kubeadm.yaml" >"$work/kubeadm.yaml"
put "$work/kubeadm.yaml" /run/kubeadm.yaml
# as a unit: what it starts belongs to the node's systemd
ask 'systemd-run --quiet --wait --pipe kubeadm init --config /run/kubeadm.yaml' 3600 >"$logs/kubeadm" 2>&1 ||
  die "kubeadm init failed: $(grep -iE 'error|fatal' "$logs/kubeadm" | head -5)"
lap "kubeadm init has ended"
ask 'cat /etc/kubernetes/admin.conf' | sed '/^$/d' >"$work/kubeconfig"

# `kubectl wait` gives up where there is nothing yet to wait for
until [ "$(kubectl get pods -n kube-system -l k8s-app=kube-dns -o name 2>/dev/null | wc -l)" = 2 ]; do sleep 0.5; done
kubectl wait --for=condition=Ready node --all --timeout=20m >/dev/null
lap "the node is Ready"
kubectl wait --for=condition=Ready pod -n kube-system --all --timeout=20m >/dev/null
lap "every pod of kube-system is Ready"
kubectl get nodes -o wide
kubectl get pods -n kube-system
[ "$(kubectl get pods -n kube-system --field-selector status.phase=Running -o name | wc -l)" = 7 ] ||
  die "there are not seven running pods in kube-system"
kubectl get --raw /readyz >/dev/null
say "memory in use: $(memory) MiB"
lap "the end"
if [ -n "${KEEP:-}" ]; then
  cp "$work/kubeconfig" "$logs/kubeconfig"
  say "kubectl --kubeconfig $logs/kubeconfig --server $server; a key ends the node"
  read -rn1
fi
