#!/usr/bin/env bash
# Runs tests of Go packages on Debian's kernel in an emulated guest, because the kernel of this system may lack a part. The guest's file
# system is an initial ramdisk with the tests, programs that they run, and modules of the kernel.
#
#   test/vm/kernel.sh FOLDER MODULES PROGRAMS [PACKAGE PATTERN]...
#
# MODULES are names, and PROGRAMS are names or paths; each is one argument with blanks in it. A program that is a script of Capstan's
# build is called by its path. The kernel is downloaded once, with apt-get, and kept in FOLDER. Tests see CAPSTAN_KERNEL=guest.
set -euo pipefail

folder=$(realpath -m "$1")
read -ra modules <<<"$2"
read -ra programs <<<"$3"
shift 3
here=$(realpath "$(dirname "$0")")
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
chmod 0755 "$root"
mkdir -p "$root"/{bin,dev,proc,sys,run,tmp,modules,tests}
for program in busybox "${programs[@]}"; do
	path=$(command -v "$program")
	install -m 0755 "$path" "$root/bin/"
	for library in $(ldd "$path" 2>/dev/null | grep -o '/[^ ]*'); do
		install -D -m 0755 "$library" "$root$library"
	done
done
ln -s bin "$root/sbin"
number=100
while (($# > 0)); do
	mkdir "$root/tests/$number"
	CGO_ENABLED=0 go test -c -ldflags "-s -w" -o "$root/tests/$number/test" "$1"
	printf '%s' "$1" >"$root/tests/$number/package"
	printf '%s' "$2" >"$root/tests/$number/pattern"
	number=$((number + 1))
	shift 2
done

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

install -m 0755 "$here/guest/kernel-init.sh" "$root/init"
(cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$folder/initrd"
timeout 1800 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 2048 -nographic -monitor none -serial stdio -nic none -no-reboot \
	-kernel "$kernel" -initrd "$folder/initrd" -append "console=ttyS0 quiet panic=-1 no_timer_check tsc=reliable" | tee "$folder/log"
grep -q '^capstan: passed' "$folder/log"
