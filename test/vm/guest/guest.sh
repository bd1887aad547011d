#!/bin/bash
# Runs in the guest at each boot, as root. It does one step after the other and continues after a reboot. The host reads its lines
# "VM: ..." from the serial port. It powers the guest off at the end.
set -uo pipefail
export HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
state=/root/steps
mkdir -p $state

say() { echo "VM: $*"; }

# step runs a function unless it passed before. A failure ends the test.
step() {
	local name=$1 start=$SECONDS
	[[ -e $state/$name ]] && return 0
	say "start $name"
	# Not in a condition: bash would ignore set -e there.
	(
		set -e
		"$name"
	) >"$state/log" 2>&1
	if (($?)); then
		sed 's/^/VM: log: /' <(tail -n 60 "$state/log")
		explain 2>&1 | sed 's/^/VM: log: /'
		say "fail $name after $((SECONDS - start)) s: $(tail -n 1 "$state/log")"
		finish failed
	fi
	touch "$state/$name"
	say "pass $name in $((SECONDS - start)) s"
}

explain() {
	systemctl --no-pager --failed
	capstan status
	kubectl get clusters,machines,capstanhosts -A
	for log in /var/lib/capstan/hosts/*/machines/*/init.log; do echo "== $log"; tail -n 15 "$log"; done
	journalctl --no-pager -n 40 --grep '^(?!VM:)'
}

# finish powers the guest off. With a shell (shell.service), a guest that failed stays up.
finish() {
	sync
	[[ ${1:-} == failed ]] && grep -q capstan.shell /proc/cmdline || systemctl poweroff
	sleep infinity
}

# until_true tries a command every 3 s, for at most the given number of seconds.
until_true() {
	local end=$((SECONDS + $1)) last
	shift
	until last=$("$@" 2>&1); do
		((SECONDS < end)) || { echo "not true in time: $*: $last"; return 1; }
		sleep 3
	done
}

kubectl() { KUBECONFIG=${KUBECONFIG:-/var/lib/capstan/admin.kubeconfig} /usr/lib/capstan/kubernetes/v1.36.3/kubectl "$@"; }
demo() { KUBECONFIG=/root/demo.kubeconfig kubectl "$@"; }

machine_pids() { for f in /var/lib/capstan/hosts/*/machines/*/; do basename "$f"; done | sort; pgrep -xa capstan-init | sort; }

# --- steps

system() {
	[[ $(stat -fc %T /sys/fs/cgroup) == cgroup2fs ]] || { echo "no unified cgroup v2"; return 1; }
	[[ $(cat /sys/module/apparmor/parameters/enabled) == Y ]]
	modprobe wireguard && modprobe ip_vs
	. /etc/os-release
	uname -r && echo "$PRETTY_NAME"
	[[ $(systemctl is-system-running) =~ running|starting|degraded ]]
}

install() {
	cd /root/packages/first
	apt-get install -y ./*.deb
	capstan version
	man -w capstan-up && man -w 8 capstand
	systemctl is-enabled capstan.service
}

doctor() {
	capstan doctor
	if capstan doctor -o json | grep -q '"level": *"fail"'; then return 1; fi
}

plane() { capstan up --timeout 60m; }

# From here on systemd runs the plane.
unit() {
	systemctl start capstan.service
	capstan up --timeout 60m
	systemctl is-active capstan.service
}

cluster() {
	capstan create cluster demo --workers 1 --timeout 90m
	capstan get kubeconfig demo >/root/demo.kubeconfig
	chmod 600 /root/demo.kubeconfig
	demo get nodes -o wide
}

service() {
	capstan load image --cluster demo /usr/lib/capstan/images/echo.tar
	demo apply -f /root/workload.yaml
	until_true 1200 demo wait --for=condition=Available --timeout=5s deployment/web
	until_true 1200 demo wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=5s pod/client
	demo logs client | grep '^web-'
}

limits() {
	until_true 600 demo wait --for=jsonpath='{.status.phase}'=Failed --timeout=5s pod/memory-hog
	demo get pod memory-hog -o jsonpath='{.status.containerStatuses[0].state.terminated.reason}' | grep -x OOMKilled
	until_true 1800 demo wait --for=jsonpath='{.status.phase}'=Failed --timeout=5s pod/fork-bomb
	if demo logs fork-bomb | grep 'no limit'; then return 1; fi
	demo delete pod memory-hog fork-bomb --wait=false
	grep -v max /sys/fs/cgroup/capstan/*/*/pids.max
	grep -v max /sys/fs/cgroup/capstan/*/*/memory.max
}

# The pods' processes have containerd's AppArmor profile.
apparmor() {
	local pid
	pid=$(pgrep -f '^/echo serve|echo serve' | head -n 1)
	cat "/proc/$pid/attr/current"
	grep -q 'enforce' "/proc/$pid/attr/current"
}

reboot_guest() {
	demo create configmap before-reboot
	touch $state/reboot_guest
	sync
	systemctl reboot
	sleep infinity
}

after_reboot() {
	until_true 1800 systemctl is-active capstan.service
	capstan up --timeout 60m
	until_true 1800 demo get configmap before-reboot
	until_true 1800 demo wait --for=condition=Ready --timeout=5s nodes --all
	until_true 1200 demo wait --for=condition=Available --timeout=5s deployment/web
	demo delete pod client --ignore-not-found
	demo apply -f /root/workload.yaml
	until_true 1200 demo wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=5s pod/client
	demo delete pod memory-hog fork-bomb --wait=false
}

upgrade() {
	local before after
	before=$(machine_pids)
	cd /root/packages/second
	apt-get install -y ./*.deb
	capstan up --timeout 60m
	capstan version | grep -F v0.1.0
	after=$(machine_pids)
	[[ $before == "$after" ]] || { echo "machines before: $before"; echo "machines after: $after"; return 1; }
	until_true 600 demo get configmap before-reboot
}

removal() {
	if apt-get purge -y capstan; then echo "the removal was not refused"; return 1; fi
	capstan down
	apt-get purge -y capstan capstan-cli 'capstan-kubernetes-*'
	local left
	left=$(
		ls -d /sys/fs/cgroup/capstan /var/lib/capstan /run/capstan /usr/lib/capstan /etc/default/capstand 2>/dev/null
		nft list tables | grep capstan
		ip -br link | grep -E '^cap|^vcap'
		ip netns list
		pgrep -a capstan
		mount | grep capstan || true # its status is that of the assignment
	)
	[[ -z $left ]] || { echo "left over: $left"; return 1; }
}

for name in system install doctor plane unit cluster service limits apparmor reboot_guest after_reboot upgrade removal; do
	step "$name"
done
say "complete"
finish
