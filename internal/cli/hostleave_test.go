//go:build linux

package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/joining"
	"capstan.dev/capstan/internal/host/statelock"
)

// joinedBox is a box that has joined, with a systemctl that records its calls.
type joinedBox struct {
	t     *testing.T
	root  string
	o     leaveOptions
	calls string
	out   bytes.Buffer
	app   *app
}

func newJoinedBox(t *testing.T) *joinedBox {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("the test needs root, as the command does")
	}
	dir := t.TempDir()
	b := &joinedBox{t: t, root: filepath.Join(dir, "host"), calls: filepath.Join(dir, "calls")}
	b.app = &app{out: &b.out, errOut: &b.out}
	b.o = leaveOptions{dir: filepath.Join(b.root, "tls"), defaults: filepath.Join(dir, "capstand"), systemd: dir}
	b.systemctl("case $1 in show) echo loaded;; esac")
	t.Setenv("PATH", filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
	return b
}

// systemctl sets what systemctl does after it has recorded its call.
func (b *joinedBox) systemctl(then string) {
	b.t.Helper()
	path := filepath.Join(filepath.Dir(b.root), "bin", "systemctl")
	b.write(path, "#!/bin/sh\necho \"$@\" >>"+b.calls+"\n"+then+"\n")
	b.must(os.Chmod(path, 0o755))
}

func (b *joinedBox) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *joinedBox) write(path, content string) {
	b.t.Helper()
	b.must(os.MkdirAll(filepath.Dir(path), 0o755))
	b.must(os.WriteFile(path, []byte(content), 0o600))
}

// join leaves what a join leaves.
func (b *joinedBox) join(defaults string) {
	b.t.Helper()
	if defaults != "" {
		b.write(b.o.defaults, defaults)
	}
	for _, name := range []string{"server.key", "server.crt", "ca.crt", ".new-123"} {
		b.write(filepath.Join(b.o.dir, name), "secret")
	}
	want := joined{Server: "https://plane", TokenID: "t", Request: joining.Request{Name: "rack-1", Address: "10.0.0.5:7443"}}
	b.must(beginJoin(b.o.dir, want))
	b.must(finishJoin(b.o.dir, want))
	options := []option{{"--listen", ":7443"}, {"--name", "rack-1"}}
	b.must(configure(b.o.dir, b.o.defaults, options))
}

func (b *joinedBox) leave() (string, error) {
	b.out.Reset()
	err := b.app.leave(b.t.Context(), b.o)
	return b.out.String(), err
}

func (b *joinedBox) read(path string) string {
	data, _ := os.ReadFile(path)
	return string(data)
}

// A leave removes what the join made and nothing else, whatever the file with the options had before.
func TestLeaveRemovesWhatJoinMade(t *testing.T) {
	for name, test := range map[string]struct{ before, joined, after string }{
		"no file":                            {"", "CAPSTAND_OPTIONS=\"--listen :7443 --name rack-1\"\n", ""},
		"the file of the package":            {"# text\nCAPSTAND_OPTIONS=\"\"\n", "# text\nCAPSTAND_OPTIONS=\"--listen :7443 --name rack-1\"\n", "# text\nCAPSTAND_OPTIONS=\"\"\n"},
		"an empty file of the administrator": {"CAPSTAND_OPTIONS=\"\"\n", "CAPSTAND_OPTIONS=\"--listen :7443 --name rack-1\"\n", "CAPSTAND_OPTIONS=\"\"\n"},
		"options of the administrator": {
			"CAPSTAND_OPTIONS=\"--reserve-memory 2Gi --listen :7443\"\nX=1\n", "CAPSTAND_OPTIONS=\"--reserve-memory 2Gi --listen :7443 --name rack-1\"\nX=1\n",
			"CAPSTAND_OPTIONS=\"--reserve-memory 2Gi --listen :7443\"\nX=1\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newJoinedBox(t)
			b.join(test.before)
			if got := b.read(b.o.defaults); got != test.joined {
				t.Fatalf("joined: %q", got)
			}
			b.write(filepath.Join(b.root, "host-id"), "id")
			out, err := b.leave()
			if err != nil || !strings.Contains(out, "has left https://plane") || !strings.Contains(out, "kubectl delete capstanhost rack-1") {
				t.Errorf("%v: %s", err, out)
			}
			if got := b.read(b.o.defaults); got != test.after || atomicfile.Exists(b.o.defaults) != (test.before != "") {
				t.Errorf("options: %q", got)
			}
			if atomicfile.Exists(b.o.dir) || !atomicfile.Exists(filepath.Join(b.root, "host-id")) {
				t.Error("the folder of the certificates exists, or the id of the host does not")
			}
			if got := b.read(b.calls); !strings.Contains(got, "stop capstand.service\ndisable capstand.service\n") {
				t.Errorf("systemctl: %s", got)
			}
		})
	}
}

// A host that joins again has the options of the last join. Those of the administrator stay.
func TestJoinAgainChangesOptions(t *testing.T) {
	b := newJoinedBox(t)
	b.join("CAPSTAND_OPTIONS=\"--reserve-memory 2Gi\"\n")
	for _, test := range []struct {
		options []option
		want    string
	}{
		{[]option{{"--listen", ":8443"}, {"--name", "rack-1"}}, "--reserve-memory 2Gi --name rack-1 --listen :8443"},
		{[]option{{"--dial", "plane.example:7444"}, {"--name", "rack-2"}}, "--reserve-memory 2Gi --dial plane.example:7444 --name rack-2"},
	} {
		for range 2 { // The command can be repeated.
			b.must(configure(b.o.dir, b.o.defaults, test.options))
			if got, want := b.read(b.o.defaults), "CAPSTAND_OPTIONS=\""+test.want+"\"\n"; got != want {
				t.Errorf("%q, want %q", got, want)
			}
		}
	}
	if out, err := b.leave(); err != nil || b.read(b.o.defaults) != "CAPSTAND_OPTIONS=\"--reserve-memory 2Gi\"\n" {
		t.Errorf("after the leave: %q, %v: %s", b.read(b.o.defaults), err, out)
	}
}

// A changed option, and a file that the join did not make, belong to the administrator.
func TestLeaveKeepsForeignFiles(t *testing.T) {
	b := newJoinedBox(t)
	b.join("")
	b.write(b.o.defaults, "CAPSTAND_OPTIONS=\"--listen :9 --name rack-1\"\n")
	b.write(filepath.Join(b.o.dir, "own.crt"), "mine")
	if _, err := b.leave(); err != nil {
		t.Fatal(err)
	}
	if got := b.read(b.o.defaults); got != "CAPSTAND_OPTIONS=\"--listen :9\"\n" {
		t.Errorf("options: %q", got)
	}
	entries, err := os.ReadDir(b.o.dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "own.crt" {
		t.Errorf("%v, %v", entries, err)
	}
}

// A leave that was killed after any of its steps is completed by the next one, with the same result.
func TestLeaveIsCompletedAfterAKill(t *testing.T) {
	for killed := 0; ; killed++ {
		b := newJoinedBox(t)
		b.join("")
		record, err := readJoinRecord(b.o.dir)
		b.must(err)
		steps := b.app.leaveSteps(b.o, record)
		if killed > len(steps) {
			return
		}
		for _, step := range steps[:killed] {
			b.must(step(t.Context()))
		}
		for range 2 {
			if out, err := b.leave(); err != nil {
				t.Errorf("killed after step %d: %v: %s", killed, err, out)
			}
		}
		if atomicfile.Exists(b.o.dir) || atomicfile.Exists(b.o.defaults) {
			t.Errorf("killed after step %d: the join has left something", killed)
		}
	}
}

// The record stays until all else is gone, so that a leave that failed is repeated.
func TestLeaveThatFailsKeepsTheRecord(t *testing.T) {
	b := newJoinedBox(t)
	b.join("")
	key := filepath.Join(b.o.dir, "server.key")
	b.must(os.Remove(key))
	b.write(filepath.Join(key, "in-the-way"), "")
	if out, err := b.leave(); err == nil || !atomicfile.Exists(filepath.Join(b.o.dir, joinedFile)) {
		t.Errorf("%v: %s", err, out)
	}
	b.must(os.RemoveAll(key))
	if out, err := b.leave(); err != nil || atomicfile.Exists(b.o.dir) {
		t.Errorf("%v: %s", err, out)
	}
}

// A join that was killed before it had a certificate can be undone.
func TestLeaveUndoesAnUnfinishedJoin(t *testing.T) {
	b := newJoinedBox(t)
	b.must(os.MkdirAll(b.o.dir, 0o700))
	b.must(beginJoin(b.o.dir, joined{Server: "https://plane", Request: joining.Request{Name: "rack-1"}}))
	b.write(filepath.Join(b.o.dir, "server.key"), "secret")
	if out, err := b.leave(); err != nil || atomicfile.Exists(b.o.dir) {
		t.Errorf("%v: %s", err, out)
	}
}

// A box that never joined stays as it is.
func TestLeaveOfABoxThatNeverJoined(t *testing.T) {
	for _, files := range [][]string{nil, {"ca.key", "server.key", "server.crt", "ca.crt"}, {"server.key", "server.crt", "ca.crt"}} {
		b := newJoinedBox(t)
		b.write(b.o.defaults, "CAPSTAND_OPTIONS=\"--listen :7443\"\n")
		for _, name := range files {
			b.write(filepath.Join(b.o.dir, name), name)
		}
		out, err := b.leave()
		if err != nil || !strings.Contains(out, "has not joined") || strings.Contains(out, "host credentials") != slices.Contains(files, "ca.key") {
			t.Errorf("%v: %v: %s", files, err, out)
		}
		for _, name := range files {
			if b.read(filepath.Join(b.o.dir, name)) != name {
				t.Errorf("%s was changed", name)
			}
		}
		if b.read(b.calls) != "" || b.read(b.o.defaults) != "CAPSTAND_OPTIONS=\"--listen :7443\"\n" {
			t.Errorf("the box was changed: %s", b.read(b.calls))
		}
	}
}

// A box with machines does not leave, unless it is forced.
func TestLeaveOfABoxInUse(t *testing.T) {
	b := newJoinedBox(t)
	b.join("")
	b.write(filepath.Join(b.root, "machines", "m-1", "spec.json"), `{"namespace":"team","name":"worker-1"}`)
	b.write(filepath.Join(b.root, "machines", "m-2", "spec.json"), "{")
	b.write(filepath.Join(b.root, "balancers", "n-1", "spec.json"), `{"namespace":"team","name":"demo"}`)
	b.write(filepath.Join(b.root, "networks", "n-1", "spec.json"), `{"namespace":"team","name":"demo"}`)
	b.write(filepath.Join(b.root, "volumes", "v-1", "spec.json"), `{"namespace":"team","name":"db-data"}`)
	out, err := b.leave()
	for _, want := range []string{"found load balancer team/demo, machine m-2, machine team/worker-1, volume team/db-data.", `patch capstanhost rack-1 --type=merge -p '{"spec":{"drain":true}}'`, "--force"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("want %q, got %v: %s", want, err, out)
		}
	}
	if b.read(b.calls) != "" || !atomicfile.Exists(filepath.Join(b.o.dir, "server.key")) {
		t.Error("the refused command changed the box")
	}
	b.o.force = true
	out, err = b.leave()
	if err != nil || !strings.Contains(out, "abandoned=") || !strings.Contains(out, "machine team/worker-1") || !strings.Contains(out, "network team/demo") || atomicfile.Exists(b.o.dir) {
		t.Errorf("forced: %v: %s", err, out)
	}
	if !atomicfile.Exists(filepath.Join(b.root, "machines", "m-1")) {
		t.Error("a machine was removed")
	}
}

// Retained volumes alone keep the host: only the deletion of a CapstanVolume deletes data, and it needs the host. A forced leave keeps
// the data, and names it.
func TestLeaveOfABoxWithVolumes(t *testing.T) {
	b := newJoinedBox(t)
	b.join("")
	spec := filepath.Join(b.root, "volumes", "v-1", "spec.json")
	b.write(spec, `{"namespace":"team","name":"db-data"}`)
	out, err := b.leave()
	if err == nil || !strings.Contains(err.Error(), "found volume team/db-data.") || b.read(b.calls) != "" {
		t.Fatalf("%v: %s", err, out)
	}
	b.o.force = true
	out, err = b.leave()
	for _, want := range []string{"the data of volume team/db-data", filepath.Join(b.root, "volumes"), "abandoned="} {
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("forced: want %q, got %v: %s", want, err, out)
		}
	}
	if strings.Contains(out, "run until this box restarts") || !atomicfile.Exists(spec) {
		t.Errorf("forced: %s", out)
	}
}

// A machine that a manager creates while capstand stops keeps the host: capstand starts again.
func TestLeaveFindsALateMachine(t *testing.T) {
	b := newJoinedBox(t)
	b.join("")
	spec := filepath.Join(b.root, "machines", "m-1", "spec.json")
	b.systemctl(fmt.Sprintf("case $1 in stop) mkdir -p %s; echo '{\"namespace\":\"a\",\"name\":\"late\"}' >%s;; esac", filepath.Dir(spec), spec))
	out, err := b.leave()
	if err == nil || !strings.Contains(err.Error(), "machine a/late") || !strings.HasSuffix(b.read(b.calls), "start capstand.service\n") || !atomicfile.Exists(filepath.Join(b.o.dir, "server.key")) {
		t.Errorf("%v: %s: %s", err, out, b.read(b.calls))
	}
}

// A capstand that runs without the unit keeps its certificates in memory: it must end first.
func TestLeaveBesideACapstandOfTheUser(t *testing.T) {
	b := newJoinedBox(t)
	b.join("")
	b.o.systemd = filepath.Join(b.root, "none")
	unlock, err := statelock.Lock(b.root)
	b.must(err)
	if out, err := b.leave(); err == nil || !strings.Contains(err.Error(), "stop it, and run the command again") || !atomicfile.Exists(filepath.Join(b.o.dir, "server.key")) {
		t.Errorf("%v: %s", err, out)
	}
	unlock()
	if out, err := b.leave(); err != nil || b.read(b.calls) != "" {
		t.Errorf("%v: %s", err, out)
	}
}
