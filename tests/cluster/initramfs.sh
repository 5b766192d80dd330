#!/usr/bin/env bash
# The network of a node whose initramfs runs: a program in a network namespace that has the node's address.
#
#   tests/cluster/initramfs.sh BRIDGE GATEWAY NUMBER PROGRAM [ARGUMENT]..    the first three as native.sh has them
#
# Needs root. It becomes the program; with that, its namespace and its end of the bridge are gone.
set -euo pipefail
[ "$1" = inside ] || exec unshare --net "$0" inside "$PPID" "$@"

outside=$2 bridge=$3 gateway=$4 number=$5
shift 5
name=fi$$
ip link add eth0 type veth peer name "$name" netns "$outside"
nsenter --target "$outside" --net ip link set "$name" master "$bridge" up
ip address add "${gateway%.*}.$number/24" dev eth0
ip link set lo up
ip link set eth0 up
ip route add default via "$gateway"
exec "$@"
