//go:build linux

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/doctor"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/stall"
	"capstan.dev/capstan/internal/testenv/expect"
)

func TestPlaneSteps(t *testing.T) {
	steps := planeSteps(embedded.Status{Installed: true, Components: []embedded.ProcessStatus{
		{Name: "etcd", State: embedded.ProcessReady}, {Name: "kube-apiserver", State: embedded.ProcessBackoff, Message: "exit status 1"}, {Name: "capstand-2", State: embedded.ProcessStarting},
	}})
	want := []step{{"etcd", true, ""}, {"API server", false, "exit status 1"}, {"CRDs, roles and webhooks", true, ""}, {"capstand-2", false, ""}, {"management plane", false, ""}}
	if diff := cmp.Diff(want, steps, cmp.AllowUnexported(step{})); diff != "" {
		t.Error(diff)
	}
}

func TestFindMachine(t *testing.T) {
	machine := func(namespace, name string) located {
		return located{machine: &hostpb.Machine{Spec: &hostpb.MachineSpec{Namespace: namespace, Name: name}}}
	}
	all := []located{machine("a", "one"), machine("a", "two"), machine("b", "two")}
	for name, test := range map[string]struct {
		namespace, name string
		code            int
		wrong           string
	}{
		"by name":               {"", "one", exitOK, ""},
		"by name and namespace": {"b", "two", exitOK, ""},
		"ambiguous name":        {"", "two", exitUsage, "--namespace"},
		"unknown":               {"", "three", exitNotFound, "found one, two, two"},
		"elsewhere":             {"b", "one", exitNotFound, "expected a machine one"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := findMachine(all, test.namespace, test.name)
			if test.code == exitOK {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || exitCode(err) != test.code || !strings.Contains(err.Error(), test.wrong) {
				t.Errorf("got %v with code %d", err, exitCode(err))
			}
		})
	}
}

// TestNoPlane: the errors name the commands that help, for this installation.
func TestNoPlane(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("KUBECONFIG", "")
	stopped := t.TempDir()
	kubeconfig := embedded.Layout{Root: stopped}.AdminKubeconfig()
	if err := errors.Join(os.WriteFile(kubeconfig, []byte(twoContexts), 0o600), os.WriteFile(embedded.Layout{Root: stopped}.State(), []byte("{}"), 0o600)); err != nil {
		t.Fatal(err)
	}
	nowhere := filepath.Join(stopped, "nowhere")
	for name, test := range map[string]struct {
		app   app
		code  int
		wrong string
	}{
		"no plane":                        {app{root: nowhere}, exitNotFound, "`capstan up --root " + nowhere + "`; or name another management cluster with --kubeconfig"},
		"no plane in a chosen root":       {app{root: nowhere, rootGiven: true}, exitNotFound, "`capstan up --root " + nowhere + "`"},
		"a stopped plane":                 {app{root: stopped}, exitFailed, "; start the management plane of this box with `capstan up --root " + stopped + "`"},
		"a kubeconfig of a stopped plane": {app{root: stopped, kubeconfig: kubeconfig}, exitFailed, "; start the management plane of this box with `capstan up --root " + stopped + "`"},
		"another server":                  {app{root: stopped, kubeconfig: kubeconfig, context: "two"}, exitFailed, "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := test.app.management()
			if err == nil || exitCode(err) != test.code || !strings.HasSuffix(err.Error(), test.wrong) && !strings.Contains(err.Error(), test.wrong+" or $KUBECONFIG") {
				t.Errorf("%v with code %d", err, exitCode(err))
			}
		})
	}
}

// TestHosts: commands find the capstands of the plane. On a host whose plane runs elsewhere, they find the capstand of
// the host.
func TestHosts(t *testing.T) {
	plane, empty := t.TempDir(), t.TempDir()
	if err := os.WriteFile(embedded.Layout{Root: plane}.State(), []byte(`{"assets":"/build","hosts":["local","local-2"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	hostname, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	unit := filepath.Join(t.TempDir(), "capstand.sock")
	if err := os.WriteFile(unit, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	local := func(name string) localHost {
		l := embedded.Layout{Root: plane}
		return localHost{name, l.HostSocket(name), l.HostRoot(name), "/build"}
	}
	for name, test := range map[string]struct {
		app  app
		unit string
		want []localHost
	}{
		"capstands of the plane":       {app{root: plane}, unit, []localHost{local("local"), local("local-2")}},
		"capstand of the systemd unit": {app{root: empty, assets: "/lib"}, unit, []localHost{{hostname, unit, empty, "/lib"}}},
		"named host":                   {app{root: plane, assets: "/lib", socket: "/s"}, unit, []localHost{{hostname, "/s", plane, "/lib"}}},
		"root folder of a named host":  {app{root: embedded.DefaultRoot, assets: "/lib", socket: "/s"}, "", []localHost{{hostname, "/s", "/var/lib/capstan/host", "/lib"}}},
		"no plane and no host":         {app{root: empty}, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := test.app.localHosts(test.unit)
			if !slices.Equal(got, test.want) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
			if (err != nil) != (test.want == nil) || err != nil && (exitCode(err) != exitNotFound || !strings.Contains(err.Error(), "--socket")) {
				t.Errorf("the error is %v", err)
			}
		})
	}
}

// TestAssetsOfHost: a host needs fewer programs than a management plane. The set of programs identifies a host.
func TestAssetsOfHost(t *testing.T) {
	assets := embedded.Assets{Dir: t.TempDir()}
	add := func(paths ...string) {
		for _, path := range paths {
			path = filepath.Join(assets.Dir, path)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o755)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if onlyHost(assets) {
		t.Error("an empty folder counts as the build of a host")
	}
	// the files that hack/release.sh packs
	add("capstan", "capstand", "capstan-init", "node/bin/runc", "node/bin/containerd", "node/cni/ptp", "images/pause.tar")
	versions := []string{"v1.36.3"}
	if missing := missingAssets(assets, versions, true); !onlyHost(assets) || missing != nil {
		t.Errorf("missing programs of a host: %v", missing)
	}
	if missing := missingAssets(assets, versions, false); len(missing) != 3 {
		t.Errorf("missing programs of a management plane: %v", missing)
	}
	add("manager")
	if onlyHost(assets) {
		t.Error("a build with a manager counts as the build of a host")
	}
}

// With --host, the box is a host also if its folder of programs has those of a management plane, as the packages do.
func TestDoctorOfHost(t *testing.T) {
	assets := t.TempDir()
	for _, name := range []string{"capstand", "manager"} {
		if err := os.WriteFile(filepath.Join(assets, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for flag, want := range map[string]bool{"--host": true, "--host=false": false} {
		var out bytes.Buffer
		code := (&app{out: &out, errOut: io.Discard}).run(t.Context(), []string{"doctor", flag, "--assets", assets, "--root", filepath.Join(assets, "root")})
		if code != exitUnfit || strings.Contains(out.String(), "of a host only") != want || strings.Contains(out.String(), "capi-core-manager") == want {
			t.Errorf("%s: exit code %d: %s", flag, code, out.String())
		}
	}
}

// TestPlaneRanks: a component that reaches a later state makes progress. A component that restarts makes no progress.
func TestPlaneRanks(t *testing.T) {
	plane := func(installed bool, etcd, api embedded.ProcessState) embedded.Status {
		return embedded.Status{Installed: installed, Components: []embedded.ProcessStatus{{Name: "etcd", State: etcd}, {Name: "kube-apiserver", State: api}}}
	}
	furthest := stall.Furthest{}
	for i, step := range []struct {
		status embedded.Status
		want   bool
	}{
		{plane(false, embedded.ProcessWaiting, embedded.ProcessWaiting), true},
		{plane(false, embedded.ProcessStarting, embedded.ProcessWaiting), true},
		{plane(false, embedded.ProcessBackoff, embedded.ProcessWaiting), false},
		{plane(false, embedded.ProcessStarting, embedded.ProcessWaiting), false},
		{plane(false, embedded.ProcessReady, embedded.ProcessStarting), true},
		{plane(false, embedded.ProcessReady, embedded.ProcessReady), true},
		{plane(false, embedded.ProcessStopped, embedded.ProcessReady), false},
		{plane(true, embedded.ProcessReady, embedded.ProcessReady), true},
		{plane(true, embedded.ProcessReady, embedded.ProcessReady), false},
	} {
		if got := furthest.Advance(planeRanks(step.status)); got != step.want {
			t.Errorf("step %d: progress is %v, want %v", i, got, step.want)
		}
	}
}

// TestForeign: a machine belongs to this plane if it has a CapstanMachine here, or if its network is that of a cluster here.
func TestForeign(t *testing.T) {
	machine := func(id, network, name string) located {
		return located{machine: &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: id, Namespace: "a", Name: name, Network: &hostpb.Network{Id: network}}}}
	}
	cluster, object, unplaced := infrav1.CapstanCluster{}, infrav1.CapstanMachine{}, infrav1.CapstanMachine{}
	cluster.Spec.ID, object.Spec.ID = "n1", "m1"
	got := foreign([]located{machine("m1", "n9", "object"), machine("m2", "n1", "cluster"), machine("m3", "n2", "two"), machine("m4", "", "one")},
		[]infrav1.CapstanCluster{cluster}, []infrav1.CapstanMachine{object, unplaced})
	if !slices.Equal(got, []string{"a/one", "a/two"}) {
		t.Errorf("got %v", got)
	}
}

// TestDownAsksForOtherBoxes: machines on hosts that joined lose their plane, which a stopped plane cannot list.
func TestDownAsksForOtherBoxes(t *testing.T) {
	on := func(host string) infrav1.CapstanMachine {
		m := infrav1.CapstanMachine{}
		m.Namespace, m.Name, m.Spec.HostName = "a", "on-"+host, host
		return m
	}
	got := onOtherBoxes([]infrav1.CapstanMachine{on("rack-2"), on("local"), on("rack-1"), on("")}, []string{"local", "local-2"})
	if !slices.Equal(got, []string{"a/on-rack-1", "a/on-rack-2"}) {
		t.Errorf("got %v", got)
	}
	for name, test := range map[string]struct {
		state   string // "" for none
		objects bool   // etcd has data
		code    int
	}{
		"no addresses":       {`{"hosts": ["local"]}`, true, exitUsage}, // The manager can connect to hosts without them.
		"a damaged state":    {`{"hosts": ["local"]`, true, exitUsage},
		"a lost state":       {"", true, exitUsage},
		"etcd never started": {`{"hosts": ["local"]}`, false, exitOK},
		"never started":      {"", false, exitOK},
	} {
		a := &app{root: t.TempDir(), errOut: io.Discard}
		err := os.WriteFile(filepath.Join(a.root, ".capstan"), nil, 0o600)
		if test.state != "" {
			err = errors.Join(err, os.WriteFile(a.layout().State(), []byte(test.state), 0o600))
		}
		if test.objects {
			err = errors.Join(err, os.Mkdir(a.layout().Etcd(), 0o700))
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := a.confirmDown(t.Context()); err == nil != (test.code == exitOK) || err != nil && exitCode(err) != test.code {
			t.Errorf("%s: %v, want exit code %d", name, err, test.code)
		}
	}
}

func TestConfirm(t *testing.T) {
	for name, test := range map[string]struct {
		answer   string
		terminal bool
		code     int
	}{
		"yes":                {"yes\n", true, exitOK},
		"no":                 {"no\n", true, exitFailed},
		"only y":             {"y\n", true, exitFailed},
		"end of input":       {"", true, exitFailed},
		"without a terminal": {"yes\n", false, exitUsage},
	} {
		err := confirm(t.Context(), strings.NewReader(test.answer), &bytes.Buffer{}, test.terminal, "2 machines")
		if (err != nil) != (test.code != exitOK) || err != nil && exitCode(err) != test.code {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The end of the command ends the question. A later answer counts no more.
func TestConfirmEnds(t *testing.T) {
	in, answer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(in.Close(), answer.Close()) }()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- confirm(ctx, in, &bytes.Buffer{}, true, "2 machines") }()
	cancel()
	if err := <-ended; exitCode(err) != exitFailed {
		t.Errorf("%v", err)
	}
	if err := confirm(ctx, strings.NewReader("yes\n"), &bytes.Buffer{}, true, "2 machines"); err == nil {
		t.Error("an answer after the end counts")
	}
}

// Only a missing machine is searched on hosts that joined the plane of this box.
func TestOnAnotherHost(t *testing.T) {
	withPlane, without := &app{root: t.TempDir()}, &app{root: t.TempDir()}
	path := withPlane.layout().AdminKubeconfig()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	missing := coded{errors.New("no such machine"), exitNotFound}
	for name, test := range map[string]struct {
		a    *app
		err  error
		want bool
	}{
		"a machine of another host": {withPlane, missing, true},
		"another error":             {withPlane, errors.New("no answer"), false},
		"no error":                  {withPlane, nil, false},
		"no plane":                  {without, missing, false},
		"--socket":                  {&app{root: withPlane.root, socket: "s"}, missing, false},
	} {
		if got := test.a.onAnotherHost(test.err); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

func TestCheckArchiveOfPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(checkArchive(pipe), checkReads(pipe, 1)); err != nil {
		t.Error(err)
	}
	if err := checkReads(pipe, 2); exitCode(err) != exitUsage || !strings.Contains(err.Error(), "which can be read once, for 2 machines") {
		t.Errorf("two machines: %v", err)
	}
}

func TestUsage(t *testing.T) {
	invalid := fmt.Errorf("cannot start: %w", embedded.InvalidOptions{})
	if code := exitCode(usage(invalid)); code != exitUsage {
		t.Errorf("invalid options: exit code %d", code)
	}
	if code := exitCode(usage(embedded.ErrNotRoot)); code != exitFailed {
		t.Errorf("another user: exit code %d", code)
	}
}

// TestBoxFiles: a bundle has the logs of the box and of its machines. Root in a machine leads it to no other file, and does not let it wait.
func TestBoxFiles(t *testing.T) {
	a := &app{root: t.TempDir()}
	secret := filepath.Join(a.root, "secret")
	machine := filepath.Join(a.root, "hosts/local/machines/m1")
	logs := filepath.Join(machine, "rootfs/var/log/capstan")
	linked := filepath.Join(a.root, "hosts/local/machines/m2/rootfs/var/log")
	for path, content := range map[string]string{
		a.layout().State(): "{}", secret: "a secret", filepath.Join(a.layout().Logs(), "etcd.log"): "etcd\n",
		filepath.Join(machine, "init.log"): "init\n", filepath.Join(logs, "kubelet.log"): "kubelet\n", filepath.Join(linked, "other"): "",
		filepath.Join(a.root, "elsewhere/kubelet.log"): "a secret",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Symlink(secret, filepath.Join(logs, "containerd.log")), unix.Mkfifo(filepath.Join(logs, "etcd.log"), 0o600),
		os.Symlink(filepath.Join(a.root, "elsewhere"), filepath.Join(linked, "capstan")),
	); err != nil {
		t.Fatal(err)
	}
	type result struct {
		files map[string][]byte
		err   error
	}
	done := make(chan result, 1)
	go func() {
		files, err := a.boxFiles(t.Context())
		done <- result{files, err}
	}()
	select {
	case r := <-done:
		got := map[string]string{}
		for name, data := range r.files {
			got[name] = string(data)
		}
		want := map[string]string{"logs/etcd.log": "etcd\n", "hosts/local/machines/m1/init.log": "init\n", "hosts/local/machines/m1/rootfs/var/log/capstan/kubelet.log": "kubelet\n"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%v\n%s", r.err, diff)
		}
	case <-time.After(expect.Patience):
		t.Fatal("the command waits for a pipe of a machine")
	}
}

// TestJournal: a bundle has the last whole lines of the journal of the plane's unit.
func TestJournal(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	a := &app{root: t.TempDir()}
	listener, err := net.Listen("unix", a.layout().StatusSocket())
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(embedded.Status{Unit: "own.service"})
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	if err := os.WriteFile(a.layout().State(), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if files, err := a.boxFiles(t.Context()); err != nil || files["logs/plane.journal"] != nil {
		t.Errorf("without systemd: %v", err)
	}
	script := fmt.Sprintf("#!/bin/sh\n[ \"$2\" = own.service ] || exit 1\nprintf 'first %%0%dd\\nlast\\n' 0\n", maxLog)
	if err := os.WriteFile(filepath.Join(os.Getenv("PATH"), "journalctl"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if files, err := a.boxFiles(t.Context()); err != nil || string(files["logs/plane.journal"]) != "last\n" {
		t.Errorf("%v, %d bytes", err, len(files["logs/plane.journal"]))
	}
}

// TestFilesOfTheChosenPlane: a bundle of another management cluster has no files of the plane of this box.
func TestFilesOfTheChosenPlane(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("KUBECONFIG", "")
	l, copied := embedded.Layout{Root: t.TempDir()}, filepath.Join(t.TempDir(), "kubeconfig")
	err := os.Mkdir(l.Logs(), 0o700)
	for path, content := range map[string]string{l.State(): `{"apiAddress": "192.0.2.1:6444"}`, l.AdminKubeconfig(): twoContexts, l.Log("etcd"): "log\n", copied: twoContexts, copied + "2": strings.ReplaceAll(twoContexts, "127.0.0.1:1", "192.0.2.1:6444")} {
		err = errors.Join(err, os.WriteFile(path, []byte(content), 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		app  app
		here bool
		left string
	}{
		"no choice":                     {app{}, true, ""},
		"a root folder":                 {app{rootGiven: true}, true, ""},
		"a copy of the kubeconfig":      {app{kubeconfig: copied}, true, ""},
		"the address for other boxes":   {app{kubeconfig: copied + "2"}, true, ""},
		"another management cluster":    {app{kubeconfig: copied, context: "two"}, false, "left out: its plane is not the management cluster https://127.0.0.1:2 of --kubeconfig"},
		"a kubeconfig that is not here": {app{kubeconfig: copied + "3"}, true, ""},
	} {
		test.app.root = l.Root
		files, err := test.app.chosenBoxFiles(t.Context())
		if here := files["logs/etcd.log"] != nil; here != test.here || !here && err != nil != (test.left != "") || test.left != "" && !strings.Contains(err.Error(), test.left) {
			t.Errorf("%s: %d files, %v", name, len(files), err)
		}
	}
}

// `capstan down` with a link as root folder removes the folder, and leaves the link to the administrator.
func TestDownOfLink(t *testing.T) {
	target, link := filepath.Join(t.TempDir(), "target"), filepath.Join(t.TempDir(), "link")
	l := embedded.Layout{Root: target}
	err := errors.Join(os.MkdirAll(l.Logs(), 0o700), os.WriteFile(filepath.Join(target, ".capstan"), nil, 0o600), os.Symlink(target, link))
	if err != nil {
		t.Fatal(err)
	}
	a := &app{out: io.Discard, errOut: io.Discard}
	if code := a.run(t.Context(), []string{"down", "--root", link}); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if _, err := os.Stat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder remains: %v", err)
	}
	if _, err := os.Lstat(link); err != nil {
		t.Error(err)
	}
}

// endOnOutput ends a command at its first output, and keeps the output.
type endOnOutput struct {
	bytes.Buffer
	end func()
}

// Write implements io.Writer.
func (e *endOnOutput) Write(p []byte) (int, error) {
	e.end()
	return e.Buffer.Write(p)
}

// TestWaitForAnotherCommand: a command that waits for another one shows it.
func TestWaitForAnotherCommand(t *testing.T) {
	root, archive := t.TempDir(), filepath.Join(t.TempDir(), "archive")
	held, err := os.Create(filepath.Join(root, ".capstan"))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := errors.Join(unix.Flock(int(held.Fd()), unix.LOCK_EX), os.WriteFile(archive, nil, 0o600), os.Chmod(root, 0o755), os.Chmod(filepath.Dir(root), 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{{"up"}, {"down"}, {"down", "--keep-state"}, {"restore", archive}} {
		ctx, cancel := context.WithTimeout(t.Context(), expect.Patience)
		out := &endOnOutput{end: cancel}
		a := &app{out: io.Discard, errOut: out}
		code := a.run(ctx, append([]string{"--root", root, "--assets", t.TempDir()}, command...))
		if want := "wait for another command, which works on " + root; code != exitFailed || !strings.Contains(out.String(), want) {
			t.Errorf("%v: exit code %d, %q, want %q", command, code, out.String(), want)
		}
		cancel()
	}
}

// A box with machines is in use. The management plane of the machines does not matter.
func TestHasMachines(t *testing.T) {
	for _, folder := range []string{"hosts/local", "host", ""} {
		a := &app{root: t.TempDir()}
		if err := os.MkdirAll(filepath.Join(a.root, folder, "machines"), 0o700); err != nil {
			t.Fatal(err)
		}
		if a.hasMachines() {
			t.Errorf("%q: an empty folder counts as machines", folder)
		}
		if err := os.Mkdir(filepath.Join(a.root, folder, "machines/m"), 0o700); err != nil {
			t.Fatal(err)
		}
		if !a.hasMachines() {
			t.Errorf("%q: the machine is missing", folder)
		}
	}
}

// `capstan status` and `capstan doctor` show why the plane does not start.
func TestFailedStartIsShown(t *testing.T) {
	var out bytes.Buffer
	a := &app{out: &out, errOut: io.Discard, root: t.TempDir(), assets: t.TempDir()}
	listener, err := net.Listen("unix", a.layout().StatusSocket())
	if err != nil {
		t.Fatal(err)
	}
	const problem = "no space left on device (next attempt in 1m0s)"
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(embedded.Status{Error: problem})
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	if err := a.localStatus(t.Context()); err != nil || !strings.Contains(out.String(), problem) {
		t.Errorf("status: %v, %s", err, out.String())
	}
	results, err := a.examine(t.Context(), false)
	if err != nil || !slices.ContainsFunc(results, func(r doctor.Result) bool { return strings.Contains(r.Found, problem) }) {
		t.Errorf("doctor: %v, %v", err, results)
	}
}
