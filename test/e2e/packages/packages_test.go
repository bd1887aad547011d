//go:build e2e

// Package packages installs, upgrades and removes the Debian packages with the real dpkg.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package packages

import (
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/testenv"
)

const (
	first  = "v0.1.0-rc.1"
	second = "v0.1.0"
)

// build builds the packages of a version in a checkout, without compression.
func build(t *testing.T, checkout, version, folder string) {
	t.Helper()
	c := exec.Command(filepath.Join(checkout, "hack", "packages.sh"), version, folder)
	c.Env = append(os.Environ(), "COMPRESSION=none", "SOURCE_DATE_EPOCH=4000000000")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("packages.sh %s: %v\n%s", version, err, out)
	}
}

// checksums returns the checksum of each package in a folder.
func checksums(t *testing.T, folder string) map[string][sha256.Size]byte {
	t.Helper()
	sums := map[string][sha256.Size]byte{}
	for _, file := range packagesIn(t, folder, "") {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		sums[filepath.Base(file)] = sha256.Sum256(content)
	}
	return sums
}

func packagesIn(t *testing.T, folder, prefix string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, prefix+"*.deb"))
	if err != nil || len(files) == 0 {
		t.Fatalf("want packages %s*.deb in %s: %v", prefix, folder, err)
	}
	return files
}

// reproducible: two builds of the same programs give the same packages, also in a checkout and with programs that were made with the
// umask 077, and on another file system, on which folders have another size. The folder has the first.
func reproducible(t *testing.T, folder string) {
	again := t.TempDir()
	mount(t, "tmpfs", again, "tmpfs", 0, "")
	build(t, privateCopy(t), first, again)
	of, other := checksums(t, folder), checksums(t, again)
	if len(of) < 4 {
		t.Errorf("want the packages of the command, the host and two Kubernetes versions, got %v", of)
	}
	for name, sum := range of {
		if other[name] != sum {
			t.Errorf("%s differs between two builds", name)
		}
	}
}

// privateCopy returns a copy of this checkout in which only the owner can read and run some files.
func privateCopy(t *testing.T) string {
	t.Helper()
	root := checkoutCopy(t)
	for file, mode := range map[string]fs.FileMode{"README.md": 0o600, "docs": 0o700, "config/systemd/capstand.service": 0o600, "bin/capstan-init": 0o700, "bin/images": 0o700} {
		if err := os.Chmod(filepath.Join(root, file), mode); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// checkoutCopy returns a copy of this checkout, in which files can change.
func checkoutCopy(t *testing.T) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "checkout")
	mountOverlay(t, testenv.Root(), root)
	return root
}

// otherSettings returns a copy of this checkout with another text in the file of settings.
func otherSettings(t *testing.T) string {
	t.Helper()
	root := checkoutCopy(t)
	if err := os.WriteFile(filepath.Join(root, "config", "systemd", "capstand.default"), []byte("# Another text.\nCAPSTAND_OPTIONS=\"\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return root
}

// mount mounts a file system until the end of the test.
func mount(t *testing.T, source, target, kind string, flags uintptr, data string) {
	t.Helper()
	if err := os.MkdirAll(target, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		t.Fatalf("mount %s: %v", target, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// mountOverlay mounts a copy of a folder, in which files can change. It returns the folder of the changed files. An overlay needs a
// file system other than an overlay for its changes.
func mountOverlay(t *testing.T, lower, target string) (upper string) {
	t.Helper()
	changes := filepath.Join(t.TempDir(), "changes")
	mount(t, "tmpfs", changes, "tmpfs", 0, "")
	upper, work := filepath.Join(changes, "upper"), filepath.Join(changes, "work")
	if err := errors.Join(os.Mkdir(upper, 0o755), os.Mkdir(work, 0o755)); err != nil {
		t.Fatal(err)
	}
	mount(t, "overlay", target, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+",workdir="+work)
	return upper
}

// box is a copy of this system, in which files can change.
type box struct {
	t     *testing.T
	root  string // the copy
	upper string // the changed files
}

// newBox mounts an overlay over this system.
func newBox(t *testing.T) *box {
	t.Helper()
	b := &box{t: t, root: filepath.Join(t.TempDir(), "root")}
	b.upper = mountOverlay(t, "/", b.root)
	mount(t, "proc", filepath.Join(b.root, "proc"), "proc", 0, "")
	mount(t, "/dev", filepath.Join(b.root, "dev"), "", unix.MS_BIND, "")
	return b
}

// try runs a command in the box.
func (b *box) try(command string) (string, error) {
	out, err := exec.Command("chroot", b.root, "/bin/sh", "-euc", command).CombinedOutput()
	return string(out), err
}

func (b *box) run(command string) string {
	b.t.Helper()
	out, err := b.try(command)
	if err != nil {
		b.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return out
}

// install installs packages of this system's folders. A question of dpkg is an error: it reads no answer.
func (b *box) install(files []string) {
	b.t.Helper()
	c := exec.Command("dpkg", append([]string{"--root=" + b.root, "-i"}, files...)...)
	c.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := c.CombinedOutput(); err != nil {
		b.t.Fatalf("dpkg -i: %v\n%s", err, out)
	}
}

// refused runs a command that must fail with a message.
func (b *box) refused(command, message string) {
	b.t.Helper()
	if out, err := b.try(command); err == nil || !strings.Contains(out, message) {
		b.t.Errorf("%s: want an error with %q, got %v\n%s", command, message, err, out)
	}
}

// whileRuns calls a function while a shell runs in the box as the program of a command line, whose first argument is "plane".
func (b *box) whileRuns(command string, do func()) {
	b.t.Helper()
	words := strings.Fields(command)
	b.write("/plane", "echo started; read end || true")
	b.run("mkdir -p " + filepath.Dir(words[0]) + "; cp /bin/sh " + words[0])
	c := exec.Command("chroot", append([]string{b.root}, words...)...)
	in, err1 := c.StdinPipe()
	out, err2 := c.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		b.t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		b.t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		b.t.Errorf("%s: %v", command, err)
	}
	do()
	if err := errors.Join(in.Close(), c.Wait()); err != nil {
		b.t.Error(err)
	}
	b.run("rm /plane " + words[0])
}

// write writes a file of the box.
func (b *box) write(path, content string) {
	b.t.Helper()
	path = filepath.Join(b.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// checkLeftovers checks that a purge has left no files.
func (b *box) checkLeftovers() {
	b.t.Helper()
	if found := b.leftovers(); len(found) > 0 {
		b.t.Errorf("files remain after the purge: %v", found)
	}
}

// leftovers returns the files of the box with a name of Capstan, without the records of dpkg.
func (b *box) leftovers() []string {
	b.t.Helper()
	var found []string
	err := filepath.WalkDir(b.upper, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(path, b.upper)
		if rel == "/var/lib/dpkg" {
			return filepath.SkipDir
		}
		// A character device of number 0/0 is the deletion of a file of this system.
		if strings.Contains(rel, "capstan") && d.Type()&fs.ModeCharDevice == 0 {
			found = append(found, rel)
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return found
}

// TestPackages: packages are installed, upgraded and removed as an administrator expects. Settings and the Kubernetes
// version of running machines survive an upgrade, a removal is refused while machines or volumes exist, and a purge leaves the data of
// users only.
func TestPackages(t *testing.T) {
	old, latest := t.TempDir(), t.TempDir()
	build(t, testenv.Root(), first, old)
	t.Run("reproducible", func(t *testing.T) { reproducible(t, old) })
	build(t, otherSettings(t), second, latest)
	b := newBox(t)

	b.install(packagesIn(t, old, ""))
	checkInstalled(t, b)

	// An upgrade with another text of the settings keeps those of the administrator, and the Kubernetes version that another package contains.
	b.write("/etc/default/capstand", "CAPSTAND_OPTIONS=\"--reserve-memory 2Gi\"\n")
	b.write("/var/lib/capstan/host/run/m1/metadata.json", `{"kubernetesVersion":"v1.35.4"}`)
	b.write("/var/lib/capstan/host/machines/m1/spec.json", "{}")
	upgrade := slices.Concat(packagesIn(t, latest, "capstan_"), packagesIn(t, latest, "capstan-cli_"), packagesIn(t, latest, "capstan-kubernetes-1.36"))
	b.install(upgrade)
	b.run(`grep -qx 'CAPSTAND_OPTIONS="--reserve-memory 2Gi"' /etc/default/capstand`)
	b.run("test -x /usr/lib/capstan/kubernetes/v1.35.4/kubelet")
	if status := b.run("dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' 'capstan*'"); !strings.Contains(status, "capstan 0.1.0 installed") ||
		!strings.Contains(status, "capstan-kubernetes-1.35.4 0.1.0~rc.1 installed") {
		t.Errorf("after the upgrade: %s", status)
	}

	refuseRemoval(b)
	purge(t, b)
	b.checkLeftovers()
	upgradeOfConffile(b, upgrade)
}

// checkInstalled checks the files of the packages.
func checkInstalled(t *testing.T, b *box) {
	b.run("test -x /usr/bin/capstan; capstan version; capstan doctor --help; /usr/lib/capstan/capstand --help")
	b.run("test -L /etc/systemd/system/multi-user.target.wants/capstan.service")
	b.run("test ! -e /etc/systemd/system/multi-user.target.wants/capstand.service")
	for _, page := range []string{"man1/capstan-create-cluster.1", "man8/capstand.8"} {
		b.run("zcat /usr/share/man/" + page + ".gz | grep -q '^.SH OPTIONS'")
	}
	// `capstan describe` names sections of this page.
	b.run("grep -q '^## No host for a machine' /usr/share/doc/capstan-cli/docs/troubleshooting.md; test ! -e /usr/share/doc/capstan-cli/docs/doc.go")
	b.run("bash -c '. /usr/share/bash-completion/completions/capstan; complete -p capstan'")
	// The links for kubectl, which runs a plugin by its name in $PATH.
	if out := b.run("kubectl-capstan --help"); !strings.Contains(out, "kubectl capstan [command]") {
		t.Errorf("kubectl-capstan: %s", out)
	}
	if out := b.run("kubectl_complete-capstan get ''"); !strings.Contains(out, "kubeconfig\t") {
		t.Errorf("kubectl_complete-capstan: %s", out)
	}
	b.run("test $(grep -lx 'RequiresMountsFor=/var/lib/capstan/.*/machines /var/lib/capstan/.*/volumes' /usr/lib/systemd/system/capstan*.service | wc -l) = 2")
	b.run("test $(grep -lE '^After=.* remote-fs.target$' /usr/lib/systemd/system/capstan*.service | wc -l) = 2")
	b.run("systemd-analyze verify --man=no /usr/lib/systemd/system/capstan.service /usr/lib/systemd/system/capstand.service")
	for unit, page := range map[string]string{"capstan": "capstan-plane.1", "capstand": "capstand.8"} {
		name, section, _ := strings.Cut(page, ".")
		b.run("grep -qFx 'Documentation=man:" + name + "(" + section + ")' /usr/lib/systemd/system/" + unit + ".service; test -e /usr/share/man/man" + section + "/" + page + ".gz")
	}

	b.run("cmp /usr/lib/capstan/systemd/capstand.default /etc/default/capstand; test $(stat -c %a /etc/default/capstand) = 644")
}

// refuseRemoval: nothing takes programs away from a machine.
func refuseRemoval(b *box) {
	b.refused("dpkg -r capstan", "this host has machines")
	b.refused("dpkg -r capstan-kubernetes-1.35.4", "uses Kubernetes v1.35.4")
	// A machine that does not run has no files in memory, but its record.
	b.run("rm -r /var/lib/capstan/host/run/m1")
	b.write("/var/lib/capstan/host/machines/m1/spec.json", `{"id":"m1", "kubernetesVersion":"v1.35.4"}`)
	b.refused("dpkg -r capstan-kubernetes-1.35.4", "uses Kubernetes v1.35.4")
	// An update in place has begun. After its end, the previous version is not in use.
	b.write("/var/lib/capstan/host/machines/m1/spec.json", `{"id":"m1", "kubernetesVersion":"v1.36.3"}`)
	b.write("/var/lib/capstan/host/machines/m1/update.json", `{"from": {"kubernetesVersion": "v1.36.3"}, "to": {"kubernetesVersion": "v1.35.4"}}`)
	b.refused("dpkg -r capstan-kubernetes-1.35.4", "uses Kubernetes v1.35.4")
	b.write("/var/lib/capstan/host/machines/m1/update.json", `{"completedAt": "2026-01-01T00:00:00Z", "from": {"kubernetesVersion": "v1.35.4"}}`)
	b.run("/var/lib/dpkg/info/capstan-kubernetes-1.35.4.prerm remove")
	b.run("rm -r /var/lib/capstan/host/machines/m1")
	b.write("/var/lib/capstan/host/balancers/b1/spec.json", "{}")
	b.refused("dpkg -r capstan", "this host has load balancers")
	b.run("rm -r /var/lib/capstan/host/balancers/b1")
	b.write("/var/lib/capstan/host/volumes/v1/spec.json", "{}")
	b.refused("dpkg -r capstan", "this host has volumes")
	b.run("rm -r /var/lib/capstan/host/volumes/v1")
	b.write("/var/lib/capstan/state.json", `{"kubernetesVersion":"v1.36.3"}`)
	b.refused("dpkg -r capstan", "this box has a management plane")
	b.refused("dpkg -r capstan-kubernetes-1.36.3", "the management plane in /var/lib/capstan uses Kubernetes v1.36.3. Change it first: capstan up --kubernetes-version")
	b.run("rm /var/lib/capstan/state.json")

	// The records of a plane or a capstand with another folder are unknown, but it runs.
	for _, group := range []string{"/sys/fs/cgroup/capstan/id/m1", "/sys/fs/cgroup/memory/capstan/id/m1"} {
		b.run("mkdir -p " + group)
		b.refused("dpkg -r capstan", "with another folder than /var/lib/capstan run on this box")
		b.run("rm -r /sys/fs")
	}
	b.whileRuns("/usr/lib/capstan/node/capstan plane --root=/srv/capstan", func() {
		b.refused("dpkg -r capstan", "a management plane with another folder")
	})
	// The programs of a plane run from its own folder. Its machine does not run.
	for _, root := range []string{"--root=/srv/capstan", "--root /srv/capstan"} {
		b.whileRuns("/usr/lib/capstan/node/capstan plane "+root, func() {
			b.write("/srv/capstan/state.json", `{"kubernetesVersion":"v1.36.3"}`)
			b.write("/srv/capstan/hosts/local/machines/m1/spec.json", `{"id":"m1", "kubernetesVersion":"v1.35.4"}`)
			b.refused("dpkg -r capstan-kubernetes-1.36.3", "Change it first: capstan up --root /srv/capstan --kubernetes-version")
			b.refused("dpkg -r capstan-kubernetes-1.35.4", "/srv/capstan/hosts/local/machines/m1/spec.json uses Kubernetes v1.35.4")
		})
	}
	b.run("rm -r /srv/capstan")
	b.whileRuns("/usr/lib/capstan/kubernetes/v1.35.4/program plane", func() {
		b.refused("dpkg -r capstan-kubernetes-1.35.4", "processes on this box run programs of Kubernetes v1.35.4")
	})
	b.run("dpkg -r capstan-kubernetes-1.35.4 2>&1")
}

// purge keeps the data of users.
func purge(t *testing.T, b *box) {
	b.write("/var/lib/capstan/host/tls/ca.key", "a key")
	b.write("/var/lib/capstan/host/unpacked/1/usr/bin/sh", "of an image")
	data := []string{"backups/plane.tar.gz", "host/backups/team/demo/first.db", "host/volumes/v1/disk.img", "hosts/local/volumes/v1/disk.img", "host/images/debian.tar", "host/container-images/app.tar"}
	for _, file := range data {
		b.write("/var/lib/capstan/"+file, "data of a user")
	}
	b.run("mv /var/lib/capstan/host/volumes /var/lib/capstan/volumes; dpkg -r capstan; mv /var/lib/capstan/volumes /var/lib/capstan/host/volumes")
	b.run("ln -s /usr/lib/systemd/system/capstand.service /etc/systemd/system/multi-user.target.wants/") // as `capstan host join` does
	out := b.run("dpkg -P capstan-cli capstan-kubernetes-1.35.4 capstan-kubernetes-1.36.3 2>&1")
	keepInUse(t, b)
	out += b.run("dpkg -P capstan 2>&1")
	for _, kept := range []string{"backups", "host/backups", "host/volumes", "hosts", "host/images", "host/container-images"} {
		if !strings.Contains(out, "capstan: /var/lib/capstan/"+kept+" remains\n") {
			t.Errorf("the purge does not name %s:\n%s", kept, out)
		}
	}
	for _, file := range data {
		b.run("test -e /var/lib/capstan/" + file)
	}
	b.run("test ! -e /var/lib/capstan/host/tls; test ! -e /var/lib/capstan/host/unpacked; test ! -e /run/capstan")
	b.run("rm -r /var/lib/capstan /sys/fs")
}

// keepInUse: the box has an installation from source or from an archive, and its administrator purges the package that was removed
// before. dpkg runs only postrm, so the test runs it alone: dpkg forgets a purged package.
func keepInUse(t *testing.T, b *box) {
	const purge = "sh /var/lib/dpkg/info/capstan.postrm purge 2>&1"
	b.write("/run/capstan/networks/n1/network.json", "{}")
	b.write("/var/lib/capstan/etcd/member/snap/db", "a database")
	kept := func(by string) {
		if out := b.run(purge); !strings.Contains(out, "capstan: an installation without this package uses this box") {
			t.Errorf("purge beside %s: %s", by, out)
		}
		b.run("cd /var/lib/capstan; test -e etcd/member/snap/db; test -e host/tls/ca.key; test -e /run/capstan/networks/n1/network.json; test -e /etc/default/capstand")
	}
	for _, file := range []string{
		"/usr/lib/capstan/capstand", "/var/lib/capstan/state.json", "/var/lib/capstan/host/machines/m1/spec.json", "/var/lib/capstan/host/balancers/b1/spec.json",
		"/var/lib/capstan/hosts/local/machines/m1/spec.json", "/var/lib/capstan/hosts/local/balancers/b1/spec.json",
		"/sys/fs/cgroup/capstan/id/m1/file", "/sys/fs/cgroup/memory/capstan/id/m1/file",
	} {
		b.write(file, "{}")
		kept(file)
		b.run("rm " + file + "; rmdir --ignore-fail-on-non-empty " + filepath.Dir(file))
	}
	for _, program := range []string{"/opt/capstan-source/bin/capstan plane --root=/srv/capstan", "/opt/capstan-source/bin/capstand plane --root=/srv/host"} {
		b.whileRuns(program, func() { kept(program) })
	}
	b.run("rm -r /sys/fs /opt/capstan-source")
	// Neither is use: files of an empty control group, and the network namespace of a machine that ended without capstand.
	b.write("/sys/fs/cgroup/capstan/id/cgroup.procs", "")
	b.write("/run/capstan/netns/n1", "")
	b.run("mount --bind /run/capstan/netns/n1 /run/capstan/netns/n1")
}

// upgradeOfConffile: the packages of an earlier build had the settings as a conffile of dpkg. An upgrade keeps the changed file.
func upgradeOfConffile(b *box, packages []string) {
	b.write("/earlier/DEBIAN/control", "Package: capstan\nVersion: 0.0.1\nArchitecture: all\nMaintainer: A <a@example.org>\nDescription: earlier build\n")
	b.write("/earlier/DEBIAN/conffiles", "/etc/default/capstand\n")
	b.write("/earlier/etc/default/capstand", "CAPSTAND_OPTIONS=\"\"\n")
	b.run("dpkg-deb -Znone --build /earlier /earlier.deb; dpkg -i /earlier.deb; rm -r /earlier /earlier.deb")
	b.write("/etc/default/capstand", "CAPSTAND_OPTIONS=\"--reserve-memory 2Gi\"\n")
	b.install(packages)
	b.run(`grep -qx 'CAPSTAND_OPTIONS="--reserve-memory 2Gi"' /etc/default/capstand`)
	b.run("dpkg -P capstan capstan-cli capstan-kubernetes-1.36.3")
	b.checkLeftovers()
}

// TestPurgeThroughLink: a purge removes the keys and keeps the data of users also if the folder of the state is a link.
func TestPurgeThroughLink(t *testing.T) {
	script, err := os.ReadFile(filepath.Join(testenv.Root(), "config", "packages", "capstan", "postrm"))
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t)
	b.write("/postrm", string(script))
	b.write("/srv/state/host/tls/ca.key", "a key")
	b.write("/srv/state/backups/plane.tar.gz", "data of a user")
	b.run("rm -rf /var/lib/capstan; ln -s /srv/state /var/lib/capstan")
	out := b.run("sh /postrm purge 2>&1")
	for _, kept := range []string{"/var/lib/capstan/backups", "the link /var/lib/capstan"} {
		if !strings.Contains(out, "capstan: "+kept+" remains\n") {
			t.Errorf("the purge does not name %s:\n%s", kept, out)
		}
	}
	b.run("test ! -e /srv/state/host; test -e /srv/state/backups/plane.tar.gz")
}
