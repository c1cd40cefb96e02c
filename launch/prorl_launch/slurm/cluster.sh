#!/usr/bin/env bash
# A real Slurm on one machine, for tests: munged, slurmctld and N slurmd, without systemd, /etc/slurm or /etc/munge.
#
#   cluster.sh install [--if-possible]   apt-get install the daemons (root); with the option a failure is a loud warning
#   cluster.sh start                     start it and wait until all nodes are idle (root)
#   cluster.sh stop                      end its jobs, and the processes that `start` began, by their pids
#   cluster.sh slurmd N                  start one slurmd that was killed
#   cluster.sh link N up|down            join or cut the network of one node (netns mode)
#
# Key, sockets, state, logs and slurm.conf all lie in $SLURM_CLUSTER_DIR: clusters live side by side, and `stop` and
# removing that folder leave nothing. A client has SLURM_CONF=$SLURM_CLUSTER_DIR/slurm.conf.
#
# Settings: SLURM_CLUSTER_DIR (required; not below /tmp in netns mode); SLURM_CLUSTER_NODES (4); SLURM_CLUSTER_CPUS, of a
# node (4); SLURM_CLUSTER_PORT, the first of N + 1 (26800); SLURM_CLUSTER_MODE: `loopback`, all nodes on 127.0.0.1 with one
# host name and one /tmp, or `netns`, where each has a network, a host name and a /tmp of its own, as in a real cluster;
# SLURM_CLUSTER_TRACKING: `linuxproc`, by which Slurm ends what it finds below a task, or `cgroup`, as most real clusters
# have it, by which it ends all processes of a step at once (takes a freezer of cgroup version 1 that may be written);
# SLURM_CLUSTER_PATIENCE_S (10): a slurmd that is silent for so long is given up; half of it passes from SIGTERM to
# SIGKILL, and until a message counts as lost.
set -Eeuo pipefail
trap 'echo "cluster.sh: line $LINENO: \"$BASH_COMMAND\" failed" >&2' ERR

readonly D=${SLURM_CLUSTER_DIR:-}
readonly N=${SLURM_CLUSTER_NODES:-4}
readonly CPUS=${SLURM_CLUSTER_CPUS:-4}
readonly PORT=${SLURM_CLUSTER_PORT:-26800}
readonly MODE=${SLURM_CLUSTER_MODE:-loopback}
readonly TRACKING=${SLURM_CLUSTER_TRACKING:-linuxproc}
readonly PATIENCE_S=${SLURM_CLUSTER_PATIENCE_S:-10}
readonly NET=10.77.$((PORT / 16 % 250)) # netns mode: .254 is the bridge and slurmctld, .i node i
readonly LINK=psl$PORT
readonly FREEZER=/sys/fs/cgroup/freezer/prorl-$PORT # of this cluster; below it each slurmd makes slurm_NODE
readonly PACKAGES=(slurmctld slurmd slurm-client munge iproute2)
export SLURM_CONF=$D/slurm.conf

die() {
    echo "cluster.sh: $*" >&2
    exit 1
}

# ---------------------------------------------------------------- install

missing() {
    local package
    for package in "${PACKAGES[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"
    done
}

install() {
    local lacking
    command -v apt-get dpkg-query >/dev/null || { echo "needs Debian or Ubuntu (apt-get)" && return 1; }
    mapfile -t lacking < <(missing)
    [ ${#lacking[@]} -gt 0 ] || return 0
    [ "$(id -u)" = 0 ] || { echo "needs root to install ${lacking[*]}" && return 1; }
    export DEBIAN_FRONTEND=noninteractive
    local command=(apt-get install -y -q --no-install-recommends -o "DPkg::Lock::Timeout=300" "${lacking[@]}")
    "${command[@]}" >/dev/null 2>&1 && return 0
    apt-get update -q >/dev/null 2>&1 || true
    "${command[@]}" 2>&1 | tail -n 20
}

install_if_possible() {
    local said
    if said=$(install 2>&1) && [ -z "$(missing)" ]; then return 0; fi
    echo "WARNING: no Slurm here, its tests are skipped: $said" >&2
}

# ---------------------------------------------------------------- start

write_conf() {
    local control=localhost bind="NoCtldInAddrAny,NoInAddrAny" nodes
    if [ "$MODE" = netns ]; then
        control="$(hostname)($NET.254)" bind=block_null_hash
        nodes="NodeName=n[1-$N] NodeHostname=n[1-$N] NodeAddr=$NET.[1-$N] Port=$((PORT + 1))"
    else
        nodes="NodeName=n[1-$N] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((PORT + 1))-$((PORT + N))]"
    fi
    printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=%s\nCgroupAutomount=no\n' "$FREEZER" >"$D/cgroup.conf"
    # Short times: tests of failures end soon.
    cat >"$SLURM_CONF" <<CONF
ClusterName=prorl
SlurmctldHost=$control
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$D/munge/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=$bind
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
ProctrackType=proctrack/$TRACKING
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
KillWait=$((PATIENCE_S / 2))
InactiveLimit=0
SlurmdTimeout=$PATIENCE_S
SlurmctldTimeout=$PATIENCE_S
MessageTimeout=$((PATIENCE_S / 2))
CompleteWait=0
ReturnToService=2
RebootProgram=/bin/false
PropagateResourceLimitsExcept=MEMLOCK,NOFILE,NPROC
$nodes CPUs=$CPUS RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO PriorityTier=2
CONF
}

# A pid file may be old and its pid another's by now: the name is checked. A zombie counts as dead.
running() {
    local state
    state=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 1
    [ -n "$state" ] && [ "${state%% *}" != Z ] || return 1
    case $(cat "/proc/$1/comm" 2>/dev/null) in munged | slurmctld* | slurmd*) ;; *) return 1 ;; esac
}
alive() { [ -s "$1" ] && running "$(cat "$1")"; }

join_networks() {
    local i
    if ! ip link show "$LINK" >/dev/null 2>&1; then
        ip link add "$LINK" type bridge
        ip addr add "$NET.254/24" dev "$LINK"
        ip link set "$LINK" up
    fi
    for i in $(seq "$N"); do
        [ ! -e "/run/netns/$LINK-n$i" ] || continue
        ip netns add "$LINK-n$i"
        ip link add "${LINK}v$i" type veth peer name eth0 netns "$LINK-n$i"
        ip link set "${LINK}v$i" master "$LINK" up
        ip -n "$LINK-n$i" link set lo up
        ip -n "$LINK-n$i" addr add "$NET.$i/24" dev eth0
        ip -n "$LINK-n$i" link set eth0 up
    done
}

remove_networks() {
    local i
    for i in $(seq "$N"); do
        [ ! -e "/run/netns/$LINK-n$i" ] || ip netns del "$LINK-n$i"
        ip link del "${LINK}v$i" 2>/dev/null || true
    done
    ip link del "$LINK" 2>/dev/null || true
}

write_hosts() {
    local i
    echo "127.0.0.1 localhost"
    for i in $(seq "$N"); do echo "$NET.$i n$i"; done
    echo "$NET.254 $(hostname)"
}

start_slurmd() { # not by `ip netns exec`, which mounts a /sys without the cgroups that slurmd looks for
    local i=$1
    rm -f "$D/slurmd-n$i.pid"
    mkdir -p "$D/spool/n$i"
    if [ "$MODE" != netns ]; then
        slurmd -f "$SLURM_CONF" -N "n$i" </dev/null >>"$D/log/slurmd-n$i.out" 2>&1
        return
    fi
    mkdir -p "$D/node/n$i/tmp"
    chmod 1777 "$D/node/n$i/tmp"
    # shellcheck disable=SC2016  # for the inner shell
    nsenter --net="/run/netns/$LINK-n$i" unshare --uts --mount --propagation private sh -ec '
        hostname "$1"; mount --bind "$2/node/$1/tmp" /tmp; mount --bind "$2/node/hosts" /etc/hosts
        exec slurmd -f "$2/slurm.conf" -N "$1"' sh "n$i" "$D" </dev/null >>"$D/log/slurmd-n$i.out" 2>&1
}

# Slurm appends the name of the controller to its mount point: a folder of that name stands for the mount.
make_cgroups() { mkdir -p "$FREEZER/freezer"; }

remove_cgroups() { # from the leaves up; of a step whose slurmstepd was killed they stay
    [ ! -d "$FREEZER" ] || find "$FREEZER" -depth -type d -exec rmdir {} +
}

failed() { # NAME LOG...
    local name=$1
    shift
    tail -n 5 "$@" >&2 || true
    die "$name did not start"
}

start() {
    [ "$(id -u)" = 0 ] || die "needs root"
    [ -z "$(missing)" ] || die "not installed: run '$0 install'"
    case $MODE:$D in netns:/tmp/*) die "in netns mode each node has its own /tmp: $D cannot be there" ;; esac
    mkdir -p "$D"/{munge,state,log,spool,node}
    chmod 755 "$D" "$D/munge"
    chmod 700 "$D/state"
    [ -s "$D/munge/munge.key" ] || (umask 077 && head -c 128 /dev/urandom >"$D/munge/munge.key")
    munged --key-file="$D/munge/munge.key" --socket="$D/munge/munge.socket" --pid-file="$D/munge/munged.pid" \
        --log-file="$D/munge/munged.log" --seed-file="$D/munge/munged.seed" --num-threads=2 ||
        failed munged "$D/munge/munged.log"
    write_conf
    [ "$TRACKING" != cgroup ] || make_cgroups
    if [ "$MODE" = netns ]; then
        write_hosts >"$D/node/hosts"
        join_networks
    fi
    slurmctld -i -f "$SLURM_CONF" </dev/null >>"$D/log/slurmctld.out" 2>&1 || failed slurmctld "$D/log/slurmctld.log"
    local i tries=0
    for i in $(seq "$N"); do start_slurmd "$i" || failed "slurmd n$i" "$D/log/slurmd-n$i.log" "$D/log/slurmd-n$i.out"; done
    until [ "$(timeout 5 sinfo -h -N -p main -t idle -o %N 2>/dev/null | wc -l)" -ge "$N" ]; do
        tries=$((tries + 1))
        [ $tries -lt 150 ] || failed "every node" "$D"/log/*.log
        sleep 0.2
    done
}

# ---------------------------------------------------------------- stop

stop() {
    local file pid
    if alive "$D/slurmctld.pid"; then
        timeout 10 squeue -h -o %A 2>/dev/null | sort -u | xargs -r timeout 10 scancel 2>/dev/null || true
        for _ in $(seq 60); do
            [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break
            sleep 0.2
        done
    fi
    for file in "$D"/slurmd-*.pid "$D"/slurmctld.pid "$D"/munge/munged.pid; do
        [ -s "$file" ] || continue
        pid=$(cat "$file")
        if running "$pid"; then kill "$pid" 2>/dev/null || true; fi
        for _ in $(seq 50); do
            running "$pid" || break
            sleep 0.1
        done
        if running "$pid"; then kill -KILL "$pid" 2>/dev/null || true; fi
        rm -f "$file"
    done
    [ "$MODE" != netns ] || remove_networks
    remove_cgroups
}

[ "${1:-}" = install ] || [ -n "$D" ] || die "set SLURM_CLUSTER_DIR"
case "${1:-}:${2:-}" in
    install:--if-possible) install_if_possible ;;
    install:) install && [ -z "$(missing)" ] ;;
    start:) start ;;
    stop:) stop ;;
    slurmd:?*) alive "$D/slurmd-n$2.pid" || start_slurmd "$2" ;;
    link:?*) ip link set "${LINK}v$2" "$3" ;;
    *)
        sed -n '2,/^set /{/^#/p}' "$0" >&2
        exit 2
        ;;
esac
