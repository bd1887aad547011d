#!/usr/bin/env bash
# Builds the disk of Debian 12 guests in a folder: the root file system, its kernel and its initial ramdisk.
#
#   test/vm/image.sh FOLDER FILES...
#
# The base system is downloaded once, with the Debian sources of this system, and kept in FOLDER/base.tar. The disk is created anew at each call:
# the packages of Capstan are in /root/packages and its archive in /root/archive, and the guest's script starts at each boot.
set -euo pipefail

folder=$(realpath -m "$1")
shift
here=$(realpath "$(dirname "$0")")
mkdir -p "$folder"

# The package's own dependencies are part of the base system, because the guest has no network.
base=linux-image-amd64,systemd,systemd-sysv,dbus,apparmor,nftables,conntrack,iproute2,procps,util-linux,mount,e2fsprogs,kmod,ca-certificates,init-system-helpers,wireguard-tools,man-db,bash-completion

if [[ ! -e $folder/base.tar ]]; then
	mapfile -t sources < <(grep -lE 'debian-archive-keyring|^deb .*bookworm' /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null)
	(("${#sources[@]}")) || { echo "image.sh: wanted Debian 12 sources of apt, found none in /etc/apt" >&2; exit 1; }
	mmdebstrap --quiet --format=tar --variant=minbase --include="$base" bookworm "$folder/base.tar.new" "${sources[@]}" >&2
	mv "$folder/base.tar.new" "$folder/base.tar"
fi

root=$(mktemp -d "$folder/root-XXXXXX")
trap 'rm -rf "$root"' EXIT
tar -xf "$folder/base.tar" -C "$root" --numeric-owner --xattrs --exclude='./dev/*'
cp -L "$root/vmlinuz" "$folder/vmlinuz"
cp -L "$root/initrd.img" "$folder/initrd.img"

mkdir -p "$root/root/packages/first" "$root/root/packages/second" "$root/root/archive"
# An upgrade replaces the programs of Capstan. Machines keep their Kubernetes version, so its package stays.
for package in "$@"; do
	case $(basename "$package") in
	*.tar.gz) cp "$package" "$root/root/archive/" ;;
	capstan-kubernetes-1.35* | capstan-kubernetes-*_0.1.0_*) ;;
	*rc.1*) cp "$package" "$root/root/packages/first/" ;;
	*) cp "$package" "$root/root/packages/second/" ;;
	esac
done
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/emulation" # the disk is emulated, and is lost anyway
install -m 0755 "$here/guest/guest.sh" "$root/root/guest.sh"
install -m 0644 "$here/guest/"{workload,twonodes,vlancluster,volume}.yaml "$root/root/"
install -D -m 0644 -t "$root/root/trunk" "$here/guest/trunk/"*
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
for unit in guest.service shell.service; do
	install -m 0644 "$here/guest/$unit" "$root/etc/systemd/system/$unit"
	ln -s "/etc/systemd/system/$unit" "$root/etc/systemd/system/multi-user.target.wants/$unit"
done
ln -sf /dev/null "$root/etc/systemd/system/serial-getty@ttyS0.service" # the script owns the serial port
echo /dev/vda / ext4 rw 0 1 >"$root/etc/fstab"
echo guest >"$root/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 guest\n' >"$root/etc/hosts"
: >"$root/etc/machine-id" # systemd creates one at the first boot

rm -f "$folder/disk.img"
truncate -s 24G "$folder/disk.img"
mkfs.ext4 -q -F -d "$root" "$folder/disk.img"
