#!/bin/sh
# Moves one request between two "pods" of a daemon and an engine each, on this machine, without a cluster.
#
#     deploy/pair/run.sh kvferry:cpu        (ENGINE_TOOL=docker for Docker; podman otherwise)
#
# Four containers with four root file systems. The two of a pod share what containers of a pod of Kubernetes share: the folder
# of the engine's socket, the network and the process ids.
set -eu
image=$1
tool=${ENGINE_TOOL:-podman}
here=$(cd "$(dirname "$0")" && pwd)
name=kvferry-pair
secret=$(mktemp)

clean() {
    for role in prefill decode; do
        for part in engine daemon; do
            $tool kill $name-$role-$part >/dev/null 2>&1 || true
            $tool rm --force $name-$role-$part >/dev/null 2>&1 || true
        done
        $tool volume rm --force $name-$role-run >/dev/null 2>&1 || true
    done
    $tool network rm $name >/dev/null 2>&1 || true
}

finish() {
    clean
    rm -f "$secret"
}

daemon() { # ROLE ADDRESS
    $tool volume create --driver local --opt type=tmpfs --opt device=tmpfs --opt o=uid=10001,gid=10001 \
        $name-"$1"-run >/dev/null
    $tool run --detach --name $name-"$1"-daemon --network $name --ip "$2" \
        --volume $name-"$1"-run:/run/kvferry --volume "$secret":/etc/kvferry/peers/secret:ro \
        --env KVFERRY_PEER_SECRET_FILE=/etc/kvferry/peers/secret \
        --env KVFERRY_PEER=0.0.0.0:7411 --env KVFERRY_ADVERTISE="$2":7411 --env KVFERRY_ALLOW_PEERS=10.89.77.0/24 \
        --env KVFERRY_UCX="TCP_PORT_RANGE=17411-17490" \
        "$image" serve >/dev/null
}

engine() { # ROLE ARGUMENTS...
    role=$1
    shift
    $tool run --name $name-"$role"-engine --network container:$name-"$role"-daemon --pid container:$name-"$role"-daemon \
        --volume $name-"$role"-run:/run/kvferry --volume "$here":/pair:ro \
        --entrypoint python "$image" /pair/engine.py "$role" "$@"
}

trap finish EXIT
clean
# What two daemons must know to speak to each other. Another user reads it in the container.
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$secret"
chmod 0444 "$secret"
$tool network create --subnet 10.89.77.0/24 $name >/dev/null
daemon prefill 10.89.77.7
daemon decode 10.89.77.8
engine prefill request-1 &
prefill=$!
engine decode request-1 10.89.77.7:7411
wait $prefill
$tool exec $name-decode-daemon kvferry transfers
$tool exec $name-decode-daemon kvferry-healthz && echo "healthy"
$tool stop --time 20 $name-prefill-daemon $name-decode-daemon >/dev/null
echo "done: both daemons have stopped by themselves"
