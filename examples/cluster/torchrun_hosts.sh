#!/usr/bin/env bash
# Trains on several hosts with torchrun. Start it on each of them, with the same arguments:
#
#     torchrun_hosts.sh FIRST image train b16-ermoe /shared/imagenet --out /shared/runs/b16 --save-every 500
#
# FIRST is the name or address of the host where all meet; what follows is a command of ermoe. A host that was lost is
# started again with the same line, and the run goes on from its last checkpoint: see docs/how-to/several-hosts.md.
#
#     HOSTS       hosts that take part                                        2
#     PROCESSES   processes on each: gpu (one a GPU), cpu, or a number        gpu
#     ADDRESS     address of this host, if it has several                     that from which it reaches FIRST
#     PORT        a free port of FIRST                                        29400
#     RESTARTS    times that torchrun starts its processes again              3
#     LIVES       times that torchrun itself is started                       20
set -euo pipefail

if (($# < 2)); then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
first=$(getent ahostsv4 "$1" | awk '{print $1; exit}') || true
case $first in
    '') echo "$1 is no host that this one knows: give its address" >&2; exit 2 ;;
    127.*) echo "$1 is $first here, where no other host comes: give its address in the network" >&2; exit 2 ;;
esac
shift
address=${ADDRESS:-$(ip -4 -o route get "$first" | sed -n 's/.* src \([^ ]*\).*/\1/p')}
interface=$(ip -4 -o addr show to "$address" | awk '{print $2; exit}')
[[ $interface ]] || { echo "ADDRESS=$address: no interface of this host has it" >&2; exit 2; }

# gloo and NCCL speak over the interface that has the address; otherwise each takes the one it finds first.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
# Every restart gets a meeting point of its own, so that a host which comes back finds the others.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
name=$(printf '%s\n' "$@" | cksum | cut -d ' ' -f 1)
is_first=false
[[ $address == "$first" ]] && is_first=true

for ((life = 1; life <= ${LIVES:-20}; life++)); do
    torchrun --nnodes="${HOSTS:-2}" --nproc-per-node="${PROCESSES:-gpu}" --max-restarts="${RESTARTS:-3}" \
        --rdzv-backend=c10d --rdzv-endpoint="$first:${PORT:-29400}" --rdzv-id="$name" \
        --rdzv-conf="is_host=$is_first" --local-addr="$address" -m ermoe "$@" &
    child=$!
    trap 'trap - INT TERM; kill -TERM "$child"; wait "$child"; exit 143' INT TERM
    wait "$child" && exit 0
    echo "torchrun ended on $address (start $life of ${LIVES:-20}); it is started again in 5 seconds" >&2
    sleep 5
done
exit 1
