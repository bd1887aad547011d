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
workload() { KUBECONFIG=/root/$1.kubeconfig kubectl "${@:2}"; }
demo() { workload demo "$@"; }
vlan() { workload vlan "$@"; }

machine_pids() { for f in /var/lib/capstan/hosts/*/machines/*/; do basename "$f"; done | sort; pgrep -xa capstan-init | sort; }

# --- steps

system() {
	[[ $(stat -fc %T /sys/fs/cgroup) == cgroup2fs ]] || { echo "no unified cgroup v2"; return 1; }
	[[ $(cat /sys/module/apparmor/parameters/enabled) == Y ]]
	modprobe wireguard && modprobe ip_vs
	fallocate -l 512M /swapfile && chmod 600 /swapfile && mkswap /swapfile
	echo '/swapfile none swap sw 0 0' >>/etc/fstab
	swapon -a
	[[ $(systemctl is-system-running) =~ running|starting|degraded ]]
}

versions() { echo "$(uname -srv), Debian $(cat /etc/debian_version), $(systemctl --version | head -n 1)"; }

install() {
	cd /root/packages/first
	apt-get install -y ./*.deb
	capstan version
	man -w capstan-up && man -w 8 capstand
	systemctl is-enabled capstan.service
}

# Neither a failed check nor a warning.
doctor() {
	capstan doctor
	if capstan doctor -o json | grep -E '"level": *"(fail|warn)"'; then return 1; fi
}

plane() { capstan up --timeout 60m; }

# From here on systemd runs the plane.
unit() {
	systemctl start capstan.service
	capstan up --timeout 60m
	systemctl is-active capstan.service
}

# create_cluster NAME creates a cluster with a worker, with the given further options.
create_cluster() {
	capstan create cluster "$@" --workers 1 --timeout 90m
	(umask 077 && capstan get kubeconfig "$1" >"/root/$1.kubeconfig")
	workload "$1" get nodes -o wide
}

cluster() { create_cluster demo; }

service() {
	capstan load image --cluster demo /usr/lib/capstan/images/echo.tar
	demo apply -f /root/workload.yaml
	until_true 1200 demo wait --for=condition=Available --timeout=5s deployment/web
	until_true 1200 demo wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=5s pod/client
	demo logs client | grep '^web-'
	until_true 1200 demo wait --for=condition=Ready --timeout=5s pod/slow-stop
}

limits() {
	until_true 600 demo wait --for=jsonpath='{.status.phase}'=Failed --timeout=5s pod/memory-hog
	demo get pod memory-hog -o jsonpath='{.status.containerStatuses[0].state.terminated.reason}' | grep -x OOMKilled
	until_true 1800 demo wait --for=jsonpath='{.status.phase}'=Failed --timeout=5s pod/fork-bomb
	if demo logs fork-bomb | grep 'no limit'; then return 1; fi
	demo delete pod memory-hog fork-bomb --wait=false
	grep -v max /sys/fs/cgroup/capstan/*/*/pids.max
	grep -v max /sys/fs/cgroup/capstan/*/*/memory.max
	swap
}

# Each machine has a share of the host's swap, and its kubelet reports this share.
swap() {
	local limits capacities
	# A group without a limit of memory is not a machine.
	limits=$(for group in /sys/fs/cgroup/capstan/*/*/; do grep -qx max "$group/memory.max" || cat "$group/memory.swap.max"; done | sort)
	capacities=$(demo get nodes -o jsonpath='{range .items[*]}{.status.nodeInfo.swap.capacity}{"\n"}{end}' | sort)
	echo "limits of swap: $limits; capacities of Nodes: $capacities"
	[[ $limits == "$capacities" && $limits != *max* ]]
	! grep -qx 0 <<<"$limits"
}

web_process() { pgrep -f '^/echo serve|echo serve' | head -n 1; }

# The pods' processes have containerd's AppArmor profile.
apparmor() {
	local pid
	pid=$(web_process)
	cat "/proc/$pid/attr/current"
	grep -q 'enforce' "/proc/$pid/attr/current"
}

# Each machine delegates controllers to its pods, and systemd leaves its groups alone. The root of a pod is an overlay on the machine's disk.
groups() {
	local before node
	before=$(machine_groups)
	echo "$before"
	[[ $(wc -l <<<"$before") == 2 ]]
	if grep -v ' cpu.* memory.* pids' <<<"$before"; then return 1; fi
	systemctl daemon-reload
	[[ $before == "$(machine_groups)" ]]
	grep ' / / .* overlay overlay ' "/proc/$(web_process)/mountinfo"
	for node in $(demo get nodes -o name); do
		demo get --raw "/api/v1/nodes/${node#node/}/proxy/configz" | grep -o '"failCgroupV1":[a-z]*' | grep -x '"failCgroupV1":true'
	done
}

# machine_groups prints the limits of each machine, and the controllers that it gives to the groups in it.
machine_groups() {
	local group
	for group in /sys/fs/cgroup/capstan/*/*/; do
		grep -qx max "$group/memory.max" || echo "$group $(cat "$group"/{memory.max,pids.max,cpu.max,cgroup.subtree_control} | tr '\n' ' ')"
	done
}

# The nftables service of Debian has the rules of docs/hosts.md and drops all other packets. Its start removes the tables of Capstan.
firewall() {
	cat >/etc/nftables.conf <<-END
		flush ruleset
		table inet filter {
			chain input {
				type filter hook input priority filter; policy drop;
				iifname "cap*" accept
				iifname "lo" accept
				ct state established,related accept
			}
			chain forward {
				type filter hook forward priority filter; policy drop;
				iifname "cap*" accept
				oifname "cap*" accept
			}
		}
	END
	systemctl enable nftables
	systemctl restart nftables
	until_true 60 has_tables
	capstan doctor
	call_service
}

has_tables() { nft list tables | grep 'inet capstan-'; }

# call_service sends a request from a new pod to the Service.
call_service() {
	demo delete pod client --ignore-not-found
	demo apply -f /root/workload.yaml -l role=client
	until_true 1200 demo wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=5s pod/client
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
	nft list chain inet filter input | grep 'policy drop'
	call_service
	# systemd waited for the pod.
	until_true 600 stopped_in_order
	demo delete pod slow-stop
}

stopped_in_order() { demo logs slow-stop | grep -x 'stopped in order'; }

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
	nothing_left
}

nothing_left() {
	local left
	left=$(
		ls -d /sys/fs/cgroup/capstan 2>/dev/null
		# Files, man pages, completions, units and their links, without the records of dpkg.
		find / /run -xdev \( -path /root -o -path /var/lib/dpkg \) -prune -o -iname '*capstan*' -print
		systemctl list-units --all --plain --no-legend 'capstan*'
		systemctl list-unit-files --no-legend 'capstan*'
		nft list tables | grep capstan
		ip -br link | grep -E '^cap|^vcap'
		ip -br link show master br-trunk
		ip netns list
		pgrep -a capstan
		mount | grep capstan || true # its status is that of the assignment
	)
	[[ -z $left ]] || { echo "left over: $left"; return 1; }
}

# archive installs and removes the archive with the commands of docs/install.md, as an administrator with a strict umask.
archive() {
	cd /root/archive
	umask 077
	command install -d -m 755 /usr/lib/capstan
	tar -C /usr/lib/capstan -xzf capstan-linux-amd64.tar.gz
	ln -s /usr/lib/capstan/capstan /usr/local/bin/capstan
	cp --remove-destination /usr/lib/capstan/systemd/*.service /etc/systemd/system/
	cp /usr/lib/capstan/systemd/capstand.default /etc/default/capstand
	systemctl daemon-reload
	systemctl enable capstan.service
	doctor
	plane # The unit starts no plane that does not exist yet.
	unit
	until_true 600 kubectl wait --for=condition=Ready --timeout=5s capstanhosts --all
	capstan down
	systemctl disable --now capstan.service
	rm -rf /etc/systemd/system/capstan.service /etc/systemd/system/capstand.service /etc/default/capstand
	rm -r /usr/lib/capstan /usr/local/bin/capstan
	rm -rf /run/capstan /run/udev/rules.d/59-capstan.rules
	systemctl daemon-reload
	umask 022
	nothing_left
}

# trunk replaces the cluster by a LAN with the configuration of docs/lan.md. The cable of the card eth1 leads to two stations with the same
# address, one in each VLAN.
trunk() {
	local vlan
	# The rules for a LAN are others.
	systemctl disable --now nftables
	until_true 60 has_tables
	kubectl delete cluster demo --wait --timeout=30m
	for vlan in 100 101; do
		ip netns add "station$vlan"
		ip -n "station$vlan" link set lo up # without it, a station waits for an answer of an address that nobody has
	done
	ip link add eth1 type veth peer name cable netns station100
	ip -n station100 link set cable up
	for vlan in 100 101; do
		ip -n station100 link add link cable name "vlan$vlan" type vlan id $vlan
		[[ $vlan == 100 ]] || ip -n station100 link set "vlan$vlan" netns "station$vlan"
		ip -n "station$vlan" address add 198.51.100.1/24 dev "vlan$vlan"
		ip -n "station$vlan" link set "vlan$vlan" up
	done
	cp /root/trunk/* /etc/systemd/network/
	systemctl start systemd-networkd
	until_true 60 has_address br-trunk.100 198.51.100.11
	kubectl patch "$(kubectl get capstanhosts -o name)" --type merge -p '{"spec": {
		"virtualAddresses": ["198.51.100.112/28"],
		"lanNetworks": [{"name": "trunk", "bridge": "br-trunk", "vlans": [100, 101], "cidr": "198.51.100.0/24",
			"addresses": ["198.51.100.128/26"], "allowedNamespaces": {"names": ["default"]}}]}}'
}

has_address() { ip address show dev "$1" | grep -F "inet $2/"; }

cluster_in_vlan() {
	create_cluster vlan --from /root/vlancluster.yaml
	node_addresses | grep -c '^198\.51\.100\.1[2-9]' | grep -x 2
	pods_across vlan
}

node_addresses() { vlan get nodes -o jsonpath='{range .items[*]}{.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}'; }

# connects STATION ADDRESS PORT opens a connection.
connects() { timeout 60 ip netns exec "$1" bash -c "exec 3<>/dev/tcp/$2/$3"; }

# is_neighbour STATION ADDRESS sends a packet, for which the station asks for the MAC address.
is_neighbour() {
	ip netns exec "$1" bash -c "echo >/dev/udp/$2/9"
	ip -n "$1" neighbour show "$2" | grep lladdr
}

# The station of VLAN 100 reaches the endpoint and the kubelet of each machine. That of VLAN 101 reaches none of them, but another
# port of its VLAN.
stations_of_vlans() {
	local address port
	while read -r address port; do
		connects station100 "$address" "$port"
		if connects station101 "$address" "$port"; then echo "VLAN 101 reaches $address"; return 1; fi
	done < <(
		kubectl get cluster vlan -o jsonpath='{.spec.controlPlaneEndpoint.host} {.spec.controlPlaneEndpoint.port}{"\n"}'
		node_addresses | sed 's/$/ 10250/'
	)
	ip netns add other101
	ip link add port101 type veth peer name card netns other101
	ip -n other101 address add 198.51.100.2/24 dev card
	ip -n other101 link set card up
	ip link set port101 master br-trunk up
	bridge vlan del dev port101 vid 1
	bridge vlan add dev port101 vid 101 pvid untagged
	until_true 60 is_neighbour station101 198.51.100.2
	ip netns del other101
	ip netns del station100
	ip netns del station101
}

# A kubelet with MemoryQoS slows a pod down before it reaches its limit.
memory_high() {
	local request=$((32 << 20)) limit=$((64 << 20)) expected
	expected=$(((request + (limit - request) * 9 / 10) / 4096 * 4096))
	find /sys/fs/cgroup/capstan -name memory.high -path '*pod*' -exec grep -Hx $expected {} +
}

# The kernel has project quotas, so a pod cannot write more into a local volume than its claim requested.
volume_size() {
	kubectl get capstanhosts -o jsonpath='{.items[0].status.localVolumeSizes}' | grep -x Enforced
	vlan apply -f /root/volume.yaml
	until_true 1200 vlan wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=5s pod/filler
	vlan logs filler | tee /dev/stderr | grep -x "size $((64 << 20))"
	if vlan logs filler | grep 'no limit'; then return 1; fi
}

# --- steps of two guests with a wire between them

role=$(grep -oP 'capstan\.role=\K\S+' /proc/cmdline)
address() { case ${1:-$role} in plane) echo 192.0.2.1 ;; host) echo 192.0.2.2 ;; esac; }
wire() { basename "$(dirname "$(grep -l 52:54:00 /sys/class/net/*/address)")"; }

network() {
	ip link set "$(wire)" up
	ip address add "$(address)/24" dev "$(wire)"
	echo 'CAPSTAND_OPTIONS="--overlay-encryption=WireGuard"' >/etc/default/capstand
	# Packets between the hosts: encrypted ones, and those in plain text.
	nft -f - <<-END
		table netdev probe {
			counter encrypted {}
			counter plain {}
			chain in {
				type filter hook ingress device $(wire) priority -500;
				udp dport 4787 counter name encrypted
				udp dport 4789 counter name plain
			}
		}
	END
}

plane_of_hosts() { capstan up --no-hosts --api-address "$(address):7442" --timeout 60m; }

token() { (umask 077 && capstan host token create --hosts 2 --ttl 12h -o json >/root/token.json && grep -oP '"token": *"\K[^"]+' /root/token.json >/root/token); }

join() {
	[[ -e /root/token ]] || { modprobe qemu_fw_cfg && (umask 077 && cat /sys/firmware/qemu_fw_cfg/by_name/opt/capstan/token/raw >/root/token); }
	capstan doctor
	capstan host join "https://$(address plane):7442" --name "$role" --token-file /root/token --timeout 60m
}

both_hosts() { until_true 1800 kubectl wait --for=condition=Ready --timeout=5s capstanhost/plane capstanhost/host; }

cluster_of_both() {
	cluster
	kubectl get capstanmachines -A -o wide
	[[ $(kubectl get capstanmachines -A -o jsonpath='{range .items[*]}{.spec.hostName}{"\n"}{end}' | sort) == $'host\nplane' ]]
}

pods_of_both() { pods_across demo; }

# pods_across CLUSTER runs two pods on two nodes. Each is asked from the other node.
pods_across() {
	local cluster=$1 ip node nodes number=0
	capstan load image --cluster "$cluster" /usr/lib/capstan/images/echo.tar
	workload "$cluster" apply -f /root/twonodes.yaml
	until_true 1200 workload "$cluster" wait --for=condition=Available --timeout=5s deployment/web
	nodes=$(workload "$cluster" get nodes -o jsonpath='{.items[*].metadata.name}')
	while read -r ip node; do
		number=$((number + 1))
		workload "$cluster" run "client-$number" --image registry.capstan.dev/echo:v1 --restart OnFailure \
			--overrides "{\"spec\":{\"nodeName\":\"$(tr ' ' '\n' <<<"$nodes" | grep -vx "$node")\"}}" -- get -for 10m -timeout 30s "http://$ip:8080/"
	done < <(workload "$cluster" get pods -l app=web -o jsonpath='{range .items[*]}{.status.podIP}{" "}{.spec.nodeName}{"\n"}{end}')
	((number == 2)) || { echo "expected 2 pods, found $number"; return 1; }
	until_true 1200 workload "$cluster" wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=5s pod/client-1 pod/client-2
}

# The kernel's WireGuard carries all packets between the hosts.
encryption() {
	ip -details link show capwg | grep wireguard
	wg show capwg
	nft list table netdev probe
	nft list counter netdev probe plain | grep 'packets 0 '
	if nft list counter netdev probe encrypted | grep 'packets 0 '; then return 1; fi
}

deletion() {
	kubectl delete cluster demo --wait --timeout=30m
	[[ -z $(kubectl get capstanmachines -A -o name) ]]
}

say "versions $(versions)"
case $role in
alone) steps="system install doctor plane unit cluster service limits apparmor groups firewall reboot_guest after_reboot upgrade trunk cluster_in_vlan memory_high stations_of_vlans volume_size removal archive" ;;
plane) steps="system install network plane_of_hosts token join both_hosts cluster_of_both pods_of_both encryption deletion" ;;
host) steps="system install network join" ;;
esac
for name in $steps; do
	step "$name"
	[[ $name != token ]] || say "token $(cat /root/token)"
done
[[ $role != host ]] || sleep infinity # the test ends this guest
say "complete"
finish
