#!/usr/bin/env bash
# A node without a virtual machine: the disk of tools/node-image.sh, booted by its own systemd in mount, PID, network, UTS,
# IPC and cgroup namespaces of this machine's kernel.
#
#   tests/cluster/native.sh FOLDER DISK NAME BRIDGE GATEWAY NUMBER    runs the node until it is killed; FOLDER is the caller's
#
# DISK is written to: give it a copy. GATEWAY is this machine on the BRIDGE, the first address of a /24; the node has the one
# with NUMBER (2 to 9) in its place, and its pods have 10.244.NUMBER.0/24, to which every node has a route. FOLDER/pid is the
# node's PID 1 when it is up. Needs root. Nothing of this machine is changed but for a veth pair and a cgroup, both gone
# afterwards: the node sees /proc/sys read-only except for its own network's part, and its own copy of what the kubelet sets.
set -euo pipefail

# In the new namespaces: mount everything, and become the node's systemd.
inside() {
  local folder=$1 disk=$2 name=$3 gateway=$5 number=$6 root=$1/root file
  local address=${gateway%.*}.$number
  mount --make-rprivate /
  mkdir -p "$root"
  mount -o loop "$disk" "$root"
  mount -t proc proc "$root/proc"
  mount -t sysfs sysfs "$root/sys"
  mount -t tmpfs -o mode=755 tmpfs "$root/run"
  mount -t tmpfs tmpfs "$root/tmp"

  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  mkdir "$root"/dev/{pts,shm}
  mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
  mount -t tmpfs tmpfs "$root/dev/shm"
  ln -s pts/ptmx "$root/dev/ptmx"; ln -s /proc/self/fd "$root/dev/fd"
  for file in null zero full random urandom tty kmsg; do
    : >"$root/dev/$file"; mount --bind "/dev/$file" "$root/dev/$file"
  done
  : >"$root/dev/console"; mount --bind /dev/null "$root/dev/console"

  mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup "$root/sys/fs/cgroup"
  else
    while IFS=: read -r _ controllers _; do
      local name=${controllers#name=} options=$controllers
      [ -n "$controllers" ] || { name=unified options=; }
      mkdir "$root/sys/fs/cgroup/$name"
      case $controllers in
      '') mount -t cgroup2 cgroup "$root/sys/fs/cgroup/$name" ;;
      name=*) mount -t cgroup -o "none,$options" cgroup "$root/sys/fs/cgroup/$name" ;;
      *) mount -t cgroup -o "$options" cgroup "$root/sys/fs/cgroup/$name" ;;
      esac
    done </proc/self/cgroup
  fi

  mount --bind "$root/proc/sys" "$root/proc/sys"
  mount -o remount,bind,ro "$root/proc/sys"
  mount -t proc proc "$root/mnt"
  mount --bind "$root/mnt/sys/net" "$root/proc/sys/net"
  umount "$root/mnt"
  # what the kubelet sets belongs to the whole machine
  while read -r file value; do
    mkdir -p "$root/run/sysctl"; echo "$value" >"$root/run/sysctl/$file"
    mount --bind "$root/run/sysctl/$file" "$root/proc/sys/${file//.//}"
  done <<END
vm.overcommit_memory 1
vm.panic_on_oom 0
kernel.panic 10
kernel.panic_on_oops 1
kernel.keys.root_maxkeys 1000000
kernel.keys.root_maxbytes 25000000
END

  {
    printf '[Match]\nName=eth0\n[Network]\nAddress=%s/24\nGateway=%s\n' "$address" "$gateway"
    for other in $(seq 2 9); do
      [ "$other" = "$number" ] || printf '[Route]\nDestination=10.244.%s.0/24\nGateway=%s\n' "$other" "${gateway%.*}.$other"
    done
  } >"$root/etc/systemd/network/05-native.network"
  sed -i "s|10\.244\.[0-9]*\.0/24|10.244.$number.0/24|" "$root/etc/cni/net.d/10-node.conflist"
  printf '127.0.0.1 localhost\n%s %s\n' "$address" "$name" >"$root/etc/hosts"
  echo "$name" >"$root/etc/hostname"
  hostname "$name"
  printf '0123456789abcdef0123456789abcd%02x\n' "$number" >"$root/etc/machine-id"
  cd "$root"
  mkdir -p run/old
  pivot_root . run/old
  umount -l run/old
  exec env -i container=firstlight PATH=/usr/sbin:/usr/bin /sbin/init
}
if [ "$1" = inside ]; then shift; inside "$@"; fi

folder=$1 bridge=$4
name=fl$$
made=()
cleanup() {
  trap '' TERM INT HUP
  [ -z "${node:-}" ] || { kill -KILL "$node" 2>/dev/null; wait "$node" 2>/dev/null; } || true
  ip link del "$name" 2>/dev/null || true
  local group try
  for group in "${made[@]}"; do
    # the dead leave their cgroups a little later
    for try in $(seq 50); do
      find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null || true
      [ -e "$group" ] || break
      sleep 0.1
    done
  done
}
trap cleanup EXIT
trap exit TERM INT HUP

# a cgroup of its own, below ours, in every hierarchy
while IFS=: read -r _ controllers path; do
  hierarchy=/sys/fs/cgroup/${controllers#name=}
  if [ -z "$controllers" ]; then
    hierarchy=/sys/fs/cgroup/unified; [ -d "$hierarchy" ] || hierarchy=/sys/fs/cgroup
  fi
  group=$hierarchy${path%/}/$name
  mkdir "$group"; made+=("$group")
  if [ -e "$group/cpuset.cpus" ] && [ -e "$group/cgroup.clone_children" ]; then
    for setting in cpuset.cpus cpuset.mems; do cat "$group/../$setting" >"$group/$setting"; done
    echo 1 >"$group/cgroup.clone_children"
  fi
done </proc/self/cgroup

# the shell that becomes `unshare` enters them, and with it all of the node
(
  for group in "${made[@]}"; do echo "$BASHPID" >"$group/cgroup.procs"; done
  exec unshare --mount --uts --ipc --net --pid --cgroup --fork --kill-child "$0" inside "$@"
) & node=$!

# its PID 1 is the one child of `unshare`
for _ in $(seq 100); do
  init=$(cat "/proc/$node/task/$node/children" 2>/dev/null) || exit 1
  init=${init// /}
  [ -z "$init" ] || break
  sleep 0.1
done
ip link add "$name" type veth peer name eth0 netns "$init"
ip link set "$name" master "$bridge" up
echo "$init" >"$folder/pid"
wait "$node"
