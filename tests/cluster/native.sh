#!/usr/bin/env bash
# A node without a virtual machine: the disk of tools/node-image.sh, booted by its own systemd in mount, PID, network, UTS,
# IPC and cgroup namespaces of this machine's kernel. It does what firmware and initrd do on the real image: the root file system
# is read-only under an overlay that is lost when the node stops, and /run/state is mounted.
#
#   tests/cluster/native.sh FOLDER NAME BRIDGE GATEWAY NUMBER    runs the node until it is killed
#
# FOLDER is the caller's: `system` (the root file system), `disk` (what a state disk holds, which is written to), `state.img` (the file
# in place of the encrypted state disk), `files` (copied over the root file system). FOLDER/pid is the node's PID 1 when it is up. GATEWAY is this machine on the BRIDGE, the first address
# of a /24; the node has the one with NUMBER in its place. Needs root. Nothing of this machine is changed but for a veth pair and a
# cgroup, both gone afterwards: the node sees /proc/sys read-only except for its own network's part, and its own copy of what the
# kubelet sets.
set -euo pipefail

# In the new namespaces: mount everything, and become the node's systemd.
inside() {
  local folder=$1 name=$2 gateway=$4 number=$5 root=$1/root file
  local address=${gateway%.*}.$number
  mount --make-rprivate /
  mkdir -p "$root" "$folder/image" "$folder/volatile"
  mount -o loop,ro "$folder/system" "$folder/image"
  mount -t tmpfs -o mode=755 tmpfs "$folder/volatile"
  mkdir "$folder"/volatile/{upper,work}
  mount -t overlay -o "lowerdir=$folder/image,upperdir=$folder/volatile/upper,workdir=$folder/volatile/work" overlay "$root"
  cp -r "$folder/files/." "$root/"
  mount -t proc proc "$root/proc"
  # udev starts only if /sys can be written: it would handle the devices of this machine
  mount -t sysfs sysfs "$root/sys"
  mount -o remount,bind,ro "$root/sys"
  mount -t tmpfs -o mode=755 tmpfs "$root/run"
  # for the tests: the image has no shell
  cp "$(command -v busybox)" "$root/run/sh"
  mkdir "$root/run/state"
  mount -o loop "$folder/disk" "$root/run/state"
  : >"$root/run/state.img"; mount --bind "$folder/state.img" "$root/run/state.img"

  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  mkdir "$root"/dev/{pts,shm}
  mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
  mount -t tmpfs tmpfs "$root/dev/shm"
  ln -s pts/ptmx "$root/dev/ptmx"; ln -s /proc/self/fd "$root/dev/fd"
  for file in null zero full random urandom tty kmsg; do
    : >"$root/dev/$file"; mount --bind "/dev/$file" "$root/dev/$file"
  done
  # a device of its own: the node's systemd changes its owner and mode
  mknod -m 600 "$root/dev/console" c 1 3

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

  # the test has no DHCP server, and nothing answers at the address of the DNS server
  printf '[Match]\nName=eth0\n[Network]\nAddress=%s/24\nGateway=%s\nDNS=%s\n' "$address" "$gateway" "$gateway" \
    >"$root/etc/systemd/network/native.network"
  hostname "$name"
  cd "$root"
  mkdir -p run/old
  pivot_root . run/old
  umount -l run/old
  # in a container systemd takes these arguments for those of the kernel's command line, which the image has in mkosi.conf
  exec env -i container=firstlight PATH=/usr/sbin:/usr/bin /sbin/init systemd.firstboot=no systemd.condition_needs_update=no
}
if [ "$1" = inside ]; then shift; inside "$@"; fi

folder=$1 bridge=$3
name=fl$$
made=()
cleanup() {
  trap '' TERM INT HUP
  [ -z "${node:-}" ] || { kill -KILL "$node" 2>/dev/null; wait "$node" 2>/dev/null; } || true
  ip link del "$name" 2>/dev/null || true
  local group
  for group in "${made[@]}"; do
    # the dead leave their cgroups a little later
    for _ in $(seq 50); do
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
