#!/usr/bin/env bash
# Makes network namespaces jax-ring-0, jax-ring-1, ... that stand for hosts, with a limited link each. Needs root.
#
#   benchmarks/hosts/namespaces.sh up NUMBER [RATE]     RATE as tc writes it, by default 1gbit
#   benchmarks/hosts/namespaces.sh down
#
# Host i has the address 10.77.0.(i + 1). A token bucket limits what it sends, and another what the switch sends to it.
# BURST and LATENCY are those of the buckets, by default 256kb and 50ms. A bucket of 32kb is too small for the timer of
# many kernels, and limits a link of 1gbit to about 600mbit.
set -euo pipefail

down() {
  for namespace in $(ip netns list | awk '/^jax-ring-/ { print $1 }'); do
    ip netns del "$namespace"
    rm -rf "/etc/netns/$namespace"
  done
}

up() {
  local number=$1 bucket=(tbf rate "${2:-1gbit}" burst "${BURST:-256kb}" latency "${LATENCY:-50ms}")
  ip netns add jax-ring-switch
  ip -n jax-ring-switch link add name sw0 type bridge
  ip -n jax-ring-switch link set sw0 up
  for ((i = 0; i < number; ++i)); do
    local host=jax-ring-$i address=10.77.0.$((i + 1))
    ip netns add "$host"
    ip link add eth0 netns "$host" type veth peer name "port$i" netns jax-ring-switch
    ip -n jax-ring-switch link set "port$i" master sw0 up
    ip -n "$host" addr add "$address/24" dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    tc -n "$host" qdisc add dev eth0 root "${bucket[@]}"
    tc -n jax-ring-switch qdisc add dev "port$i" root "${bucket[@]}"
    # Gloo listens at the address of the host's name.
    mkdir -p "/etc/netns/$host"
    echo "$address $(hostname) localhost" >"/etc/netns/$host/hosts"
  done
}

[ "$(id -u)" = 0 ] || { echo "$0 needs root" >&2; exit 1; }
case ${1:-} in
  up) trap 'down' ERR; up "${@:2}" ;;
  down) down ;;
  *) sed -n '2,6p' "$0" >&2; exit 2 ;;
esac
