#!/bin/busybox sh
# The first process of the guest of test/vm/kernel.sh.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp CAPSTAN_KERNEL=guest
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
for module in /modules/*; do
	insmod "$module" || echo "no module $module"
done
ip link set lo up
result=passed
for test in /tests/*; do
	echo "== $(cat "$test/package")"
	cd "$test" || result=failed
	./test -test.v -test.run "$(cat pattern)" || result=failed
done
echo "capstan: $result"
sync
reboot -f
