#!/usr/bin/env bash
# Builds Kubernetes' end-to-end tests and the images that its conformance specs use into bin/conformance: without Docker and without
# a registry, from the module kube/conformance and programs of Debian packages. docs/conformance.md lists the images.
set -euo pipefail -f # no patterns of file names: a program is called "["
cd "$(dirname "$0")/.."

module=kube/conformance
out=bin/conformance
mkdir -p bin
work=$(mktemp -d bin/.work-XXXXXX)
trap 'rm -rf "$work"' EXIT
source=$(cd $module && go list -m -f '{{.Dir}}' k8s.io/kubernetes)/test/images

build_programs() {
	hack/download.sh $module list -deps -test k8s.io/kubernetes/test/e2e
	# The tests compare their version with that of the API server.
	local kubernetes version
	version=$(cd $module && go list -m -f '{{.Version}}' k8s.io/kubernetes)
	kubernetes="-s -w -X k8s.io/component-base/version.gitVersion=$version"
	(cd $module && go test -c -ldflags "$kubernetes" -o "$OLDPWD/$work/e2e.test" k8s.io/kubernetes/test/e2e)
	hack/go-install.sh $module "$work" github.com/onsi/ginkgo/v2/ginkgo k8s.io/kubernetes/test/images/agnhost \
		k8s.io/kubernetes/test/images/nonewprivs k8s.io/sample-apiserver go.etcd.io/etcd/server/v3
	chmod u+s "$work/nonewprivs"
	mv "$work/server" "$work/etcd"
	hack/go-install.sh node/images "$work" ./mkimage ./pause
}

# names prints the names with which the tests ask for an image, as arguments of mkimage.
names() {
	grep -E "^registry\.k8s\.io/(e2e-test-images/)?$1:" "$work/images" | sed 's/^/-name /' ||
		{ echo "conformance-build.sh: the tests use no image $1: compare with e2e.test --list-images" >&2; exit 1; }
}

# image NAME [mkimage argument...]: the images are in one list of arguments, because their names never contain spaces.
image() {
	local name=$1
	shift
	# shellcheck disable=SC2046 # a list on purpose
	"$work/mkimage" $(names "$name") -user 0:0 -out "$work/out/$name.tar" "$@"
}

# program prints the arguments that add programs of this box and the libraries that they load.
program() {
	local path
	for path in "$@"; do
		printf -- '-file %s:%s\n' "$(realpath "$path")" "$path"
		ldd "$path" | grep -o '/[^ ]*' | sed 's/.*/-file &:&/'
	done | sort -u
}

# tools [COMMAND...]: the commands of busybox without some that other programs replace. Its shell would prefer its own commands to
# such programs, so bash is the shell then.
tools() {
	local applet shell=$module/sh
	(($# == 0)) || shell=/bin/bash-static
	printf -- '-folder /tmp\n-file %s:/bin/sh\n-file /bin/bash-static:/bin/bash-static\n-file %s:/etc/passwd\n-file %s:/etc/group\n' "$shell" "$work/passwd" "$work/group"
	for applet in $(/bin/busybox --list); do
		[[ $applet == sh || $applet == busybox || " $* " == *" $applet "* ]] || printf -- '-link /bin/busybox:/bin/%s\n' "$applet"
	done
	printf -- '-file /bin/busybox:/bin/busybox\n-link bash-static:/bin/bash\n'
}

build_images() {
	mkdir -p "$work/out"
	"$work/e2e.test" --list-images | sort -u >"$work/images"
	printf 'root:x:0:0:root:/root:/bin/sh\nuser-defined-in-image:x:1000:1000::/:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n' >"$work/passwd"
	printf 'root:x:0:\nuser-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\nnogroup:x:65534:\n' >"$work/group"
	echo 'Welcome to the web server of busybox.' >"$work/index.html"
	echo 'NAME="not Alpine Linux, but a spec searches for this name"' >"$work/os-release"
	local tools network agnhost
	# shellcheck disable=SC2207 # words on purpose
	tools=($(tools)) network=($(tools nc) $(program /usr/bin/dig /usr/bin/curl /usr/bin/getent) $(program /bin/nc.openbsd | sed 's,:/bin/nc.openbsd$,:/bin/nc,'))
	agnhost=("${network[@]}" -folder /uploads -link agnhost:/agnhost-2
		-file "$source/agnhost/porter/localhost.crt:/localhost.crt" -file "$source/agnhost/porter/localhost.key:/localhost.key")

	image agnhost "${agnhost[@]}" "$work/agnhost" pause
	image busybox -no-entrypoint "${tools[@]}" /bin/busybox sh
	image glibc-dns-testing -no-entrypoint "${network[@]}" /bin/busybox sh
	image nonroot -user 1234:0 -no-entrypoint "${tools[@]}" /bin/busybox sh
	image nonewprivs -no-entrypoint "${tools[@]}" "$work/nonewprivs" /nonewprivs
	image nginx -no-entrypoint "${tools[@]}" -file "$work/index.html:/usr/share/nginx/html/index.html" /bin/busybox \
		/bin/busybox httpd -f -p 80 -h /usr/share/nginx/html
	image nautilus "${agnhost[@]}" -file "$source/nautilus/html/nautilus.jpg:/nautilus.jpg" \
		-file "$source/nautilus/html/data.json:/data.json" "$work/agnhost" test-webserver
	image kitten "${agnhost[@]}" -file "$source/kitten/html/kitten.jpg:/kitten.jpg" -file "$source/kitten/html/data.json:/data.json" \
		-file "$work/os-release:/etc/os-release" "$work/agnhost" test-webserver
	image pause "$work/pause"
	image sample-apiserver "$work/sample-apiserver"
	image etcd -no-entrypoint -file "$work/etcd:/usr/local/bin/etcd" "$work/etcd" /usr/local/bin/etcd
}

build_programs
build_images
rm -rf $out
mkdir -p $out
mv "$work/out" $out/images
mv "$work/e2e.test" "$work/ginkgo" $out/
