#!/bin/busybox sh
# The first process of the guest of test/vm/vlan.sh.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
for module in /modules/*; do
	insmod "$module" || echo "no module $module"
done
ip link set lo up
if /bin/test.go -test.v -test.run "$(cat /pattern)"; then
	echo "capstan: passed"
else
	echo "capstan: failed"
fi
sync
reboot -f
