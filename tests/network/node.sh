#!/bin/busybox sh
# A node of the test of the network between nodes (main.rs): eth0 leads to the API server, eth1 to the other node. The default
# route leads to the other node too, as a cloud's router forwards a packet to the node that has the address.
. /etc/node
for module in /lib/network/*; do insmod "$module"; done
mkdir /var; ln -s /run /var/run
sysctl -q -w net.ipv4.ip_forward=1
ip link set eth1 up
ip address add "10.77.0.$NUMBER/24" dev eth1
ip route del default
ip route add default via "10.77.0.$OTHER" dev eth1
# with iproute2, because busybox has no `netns`
/sbin/ip netns add pod
/sbin/ip -n pod link set lo up
exec /etc/os-init
