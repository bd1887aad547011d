#!/usr/bin/env bash
# Runs a command in namespaces of its own, as if it had the box for itself: processes, mounts, /run, network, cgroups, host
# name and IPC. So several tests that look for leftovers on the host can run at a time. The network is a loopback device and
# a default route without a peer. All processes end with the command. Needs root.
#
#   hack/isolated.sh NAME COMMAND [ARGUMENT...]
set -euo pipefail

cgroup_mounts() { awk '/ - cgroup2? / { print $5 }' /proc/self/mountinfo; }

# enter runs as PID 1 of the new namespaces.
enter() {
	mount -t tmpfs -o mode=755 tmpfs /run
	for mount in $(cgroup_mounts); do
		mount --bind "$mount/$group" "$mount"
		# In cgroup v2, a group with processes cannot have limits for its children.
		if [[ -e $mount/cgroup.controllers ]]; then
			mkdir "$mount/tests"
			echo 0 >"$mount/tests/cgroup.procs"
		fi
	done
	ip link set lo up
	ip link add uplink type veth peer name cable
	ip address add 198.18.255.2/24 dev uplink
	ip link set uplink up
	ip link set cable up
	ip route add default via 198.18.255.1
	# A lookup of a name fails at once, and does not wait for a server behind the default route.
	while read -r key server _; do
		[[ $key != nameserver || $server == 127.* || $server == ::1 ]] || ip route add unreachable "$server"
	done </etc/resolv.conf
	"$@"
}

create_groups() {
	for mount in $(cgroup_mounts); do
		mkdir -p "$mount/$group"
		for file in cpuset.cpus cpuset.mems; do # cgroup v1 refuses processes while they are empty.
			[[ ! -e $mount/$file ]] || cat "$mount/$file" >"$mount/$group/$file"
		done
	done
}

# remove_groups NAME removes the cgroups of a run whose processes are ending.
remove_groups() {
	for mount in $(cgroup_mounts); do
		# The processes of a killed namespace are gone after some milliseconds.
		for _ in {1..100}; do
			[[ -e $mount/$1 ]] || break
			find "$mount/$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
		done
	done
}

# remove_old_groups removes the cgroups of runs that were killed before they could do so.
remove_old_groups() {
	for mount in $(cgroup_mounts); do
		for path in "$mount"/isolated-*; do
			[[ -e $path && ! -e /proc/${path##*-} ]] || continue
			remove_groups "${path##*/}"
		done
	done
}

# store_cpu writes the processor time of the run, in seconds, to the results of tests. cgroup v1 and v2 have different files.
store_cpu() {
	[[ -d bin/test-events ]] || return 0
	for mount in $(cgroup_mounts); do
		cat "$mount/$group"/{cpuacct.usage,cpu.stat} 2>/dev/null || true
	done | awk 'NF == 1 { seconds = $1 / 1e9 } $1 == "usage_usec" { seconds = $2 / 1e6 } END { printf "%.1f\n", seconds }' >"$1"
}

if [[ ${1:-} == --enter ]]; then
	group=$2
	shift 2
	enter "$@"
	exit
fi

name=$1 group=isolated-$1-$$
shift
remove_old_groups
trap 'store_cpu "bin/test-events/$name.cpu"; remove_groups "$group"' EXIT
create_groups
(
	for mount in $(cgroup_mounts); do
		echo "$BASHPID" >"$mount/$group/cgroup.procs"
	done
	# The namespaces end with this script, however it ends.
	exec setpriv --pdeathsig KILL -- unshare --pid --fork --kill-child --mount --propagation slave --mount-proc \
		--net --cgroup --uts --ipc -- "$0" --enter "$group" "$@"
) &
child=$!
# unshare ignores SIGTERM while its child runs.
trap 'kill -KILL "$child"' INT TERM
wait "$child"
