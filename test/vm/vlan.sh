#!/usr/bin/env bash
# Runs tests of a Go package on Debian's kernel in an emulated guest, because the kernel of this system may lack a part. The guest's file
# system is an initial ramdisk with the test, nft and some modules.
#
#   test/vm/vlan.sh FOLDER PACKAGE PATTERN
#
# The kernel is downloaded once, with apt-get, and kept in FOLDER.
set -euo pipefail

folder=$(realpath -m "$1") package=$2 pattern=$3
here=$(realpath "$(dirname "$0")")
modules=(veth bridge 8021q nf_tables nft_compat nft_ct nft_nat nft_masq nft_redir nft_fib_inet nft_reject_inet nft_reject_bridge nft_chain_nat nft_limit nft_log nft_socket nft_meta_bridge)
mkdir -p "$folder"

image=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
if [[ ! -d $folder/$image ]]; then
	(cd "$folder" && apt-get download "$image")
	dpkg -x "$folder/$image"_*.deb "$folder/$image.new"
	mv "$folder/$image.new" "$folder/$image"
	rm "$folder/$image"_*.deb
fi
kernel=$(echo "$folder/$image"/boot/vmlinuz-*)
version=${kernel##*/vmlinuz-}

root=$(mktemp -d "$folder/root-XXXXXX")
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,dev,proc,sys,run,tmp,modules}
for program in busybox nft; do
	path=$(command -v "$program")
	install -m 0755 "$path" "$root/bin/"
	for library in $(ldd "$path" 2>/dev/null | grep -o '/[^ ]*'); do
		install -D -m 0755 "$library" "$root$library"
	done
done
ln -s bin "$root/sbin"
CGO_ENABLED=0 go test -c -o "$root/bin/test.go" "$package"

# Modules in the order of their dependencies. A module that this kernel lacks is left out.
depmod -b "$folder/$image" "$version" 2>/dev/null || true
number=100
for module in "${modules[@]}"; do
	while read -r kind file _; do
		[[ $kind == insmod ]] || continue
		name=$(basename "$file")
		[[ -n $(find "$root/modules" -name "*-$name" -print -quit) ]] && continue
		cp "$file" "$root/modules/$number-$name"
		number=$((number + 1))
	done < <(modprobe --dirname "$folder/$image" --set-version "$version" --show-depends --ignore-install "$module" 2>/dev/null || true)
done

install -m 0755 "$here/guest/vlan-init.sh" "$root/init"
printf '%s' "$pattern" >"$root/pattern"
(cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$folder/initrd.vlan"
timeout 1800 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 2048 -nographic -monitor none -serial stdio -nic none -no-reboot \
	-kernel "$kernel" -initrd "$folder/initrd.vlan" -append "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable" | tee "$folder/vlan.log"
grep -q '^capstan: passed' "$folder/vlan.log"
