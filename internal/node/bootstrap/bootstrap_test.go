package bootstrap

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/process/processtest"
	"capstan.dev/capstan/internal/testenv/expect"
)

type fixture struct {
	t *testing.T
	*Runner
	dir      string
	log      strings.Builder
	hostname string
}

func newFixture(t *testing.T) *fixture {
	f := &fixture{t: t, dir: t.TempDir()}
	f.Runner = f.again()
	return f
}

// again returns the Runner of the next PID 1 of the same machine.
func (f *fixture) again() *Runner {
	f.Runner = &Runner{
		Starter: processtest.Starter{}, Log: slog.New(slog.NewTextHandler(&f.log, nil)), Metadata: machine.Metadata{ID: "id", Hostname: "m"},
		Root: f.dir, DataPath: f.path("run/data"), RecordPath: f.path("var/record"), Sentinel: f.path("run/sentinel"), LogPath: f.path("log/bootstrap.log"),
		SetHostname: func(name string) error { f.hostname = name; return nil },
	}
	return f.Runner
}

func (f *fixture) path(name string) string { return filepath.Join(f.dir, name) }

func (f *fixture) give(data string) {
	f.t.Helper()
	if err := os.MkdirAll(f.path("run"), 0o755); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(f.path("run/data"), []byte("#cloud-config\n"+data), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) read(name string) string {
	data, _ := os.ReadFile(f.path(name))
	return string(data)
}

// apply runs the bootstrap to its end. It returns the last state, the last message and all states.
func (f *fixture) apply() (initapi.Bootstrap, string, []initapi.Bootstrap) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	var states []initapi.Bootstrap
	var last string
	f.Run(ctx, func(state initapi.Bootstrap, message string) {
		if state == initapi.Succeeded || state == initapi.Failed {
			if _, err := os.Stat(f.DataPath); err == nil && len(states) > 1 {
				f.t.Errorf("the state is %s, but the data still exists", state)
			}
		}
		states, last = append(states, state), message
	})
	if ctx.Err() != nil {
		f.t.Fatalf("the bootstrap did not end: %v", states)
	}
	return states[len(states)-1], last, states
}

const sentinel = "- echo success > $DIR/run/sentinel\n"

func (f *fixture) expand(data string) string { return strings.ReplaceAll(data, "$DIR", f.dir) }

// IM-08: the bootstrap applies everything in cloud-init's order, then erases the data. A later start changes nothing.
func TestApply(t *testing.T) {
	f := newFixture(t)
	f.give(f.expand(`
bootcmd: [ 'echo boot >> $DIR/order' ]
hostname: chosen
write_files:
- {path: /etc/secret, content: hunter2, permissions: '0600'}
- {path: /etc/late, content: late, defer: true}
runcmd:
- cd $DIR; export A=b
- [sh, -c, 'echo "run $A $(basename $(pwd))" >> order; cat etc/late >> order']
` + sentinel))
	state, message, states := f.apply()
	if state != initapi.Succeeded {
		t.Fatalf("%s: %s\n%s", state, message, f.read("log/bootstrap.log"))
	}
	if want := []initapi.Bootstrap{initapi.Waiting, initapi.Started, initapi.Succeeded}; !slices.Equal(states, want) {
		t.Errorf("states %v", states)
	}
	if got, want := f.read("order"), "boot\nrun b "+filepath.Base(f.dir)+"\nlate"; got != want {
		t.Errorf("order %q, want %q", got, want)
	}
	info, err := os.Stat(f.path("etc/secret"))
	if err != nil || info.Mode().Perm() != 0o600 || f.hostname != "chosen" {
		t.Errorf("%v %v %q", info, err, f.hostname)
	}
	for _, name := range []string{"var/record", "log/bootstrap.log"} {
		if strings.Contains(f.read(name), "hunter2") {
			t.Errorf("%s contains the data", name)
		}
	}
	if strings.Contains(f.log.String(), "hunter2") {
		t.Error("the log contains the data")
	}

	// The next PID 1 finds no data. If capstand has not noticed the end of the bootstrap yet, it finds the old data again.
	for _, stray := range []bool{false, true} {
		if stray {
			f.give("runcmd: ['echo again >> " + f.path("order") + "']")
		}
		f.again()
		if state, _, _ := f.apply(); state != initapi.Succeeded || strings.Contains(f.read("order"), "again") {
			t.Errorf("stray data %v: %s", stray, state)
		}
		if _, err := os.Stat(f.DataPath); err == nil {
			t.Error("stray data was not erased")
		}
	}
}

// A machine that dies during the bootstrap continues after the last step that succeeded.
func TestGoesOn(t *testing.T) {
	f := newFixture(t)
	data := f.expand(`
write_files: [{path: /list, content: "file\n", append: true}]
runcmd:
- echo one >> $DIR/list
- '[ -e $DIR/mended ] || { echo try >> $DIR/tries; exit 7; }'
- echo two >> $DIR/list
` + sentinel)
	f.give(data)
	state, message, _ := f.apply()
	if state != initapi.Failed || !strings.Contains(message, "runcmd: [1]: exit code 7") || !strings.Contains(message, f.LogPath) {
		t.Fatalf("%s: %s", state, message)
	}
	// Without data, it reports the same error again.
	f.again()
	ctx, cancel := context.WithCancel(context.Background())
	f.Run(ctx, func(state initapi.Bootstrap, again string) {
		if state != initapi.Failed || again != message {
			t.Errorf("after a restart without data: %s %s", state, again)
		}
		cancel()
	})
	if err := os.WriteFile(f.path("mended"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.give(data)
	f.again()
	if state, message, _ := f.apply(); state != initapi.Succeeded {
		t.Fatalf("%s: %s", state, message)
	}
	if got := f.read("list"); got != "file\none\ntwo\n" {
		t.Errorf("list %q", got)
	}
	if got := f.read("tries"); got != "try\n" {
		t.Errorf("tries %q", got)
	}
}

// A script that continues keeps `set -e`, with which the data of Capstan begins: each line of a command can end the bootstrap.
func TestGoesOnWithSetE(t *testing.T) {
	f := newFixture(t)
	data := f.expand(`
runcmd:
- ` + nodeconfig.EndOnFailure + `
- '[ -e $DIR/mended ]'
- "false\ntouch $DIR/next"
` + sentinel)
	for _, tt := range []struct{ name, want string }{{"first", "runcmd: [1]: exit code 1"}, {"mended", "runcmd: [2]: exit code 1"}} {
		if err := os.WriteFile(f.path(tt.name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		f.give(data)
		f.again()
		if state, message, _ := f.apply(); state != initapi.Failed || !strings.Contains(message, tt.want) {
			t.Errorf("%s: %s, want %s", state, message, tt.want)
		}
	}
	if _, err := os.Stat(f.path("next")); err == nil {
		t.Error("the line after one that failed ran")
	}
}

// A crash between an append and its record does not cause a second append.
func TestAppendTwice(t *testing.T) {
	f := newFixture(t)
	if err := f.load(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.path("a"), []byte("old "), 0o600); err != nil {
		t.Fatal(err)
	}
	file := cloudconfig.File{Path: "/a", Content: []byte("new"), Append: true, Mode: 0o600}
	for range 2 {
		step := step{name: "step", file: &file}
		staged, err := f.stage(step, 0)
		if err == nil {
			err = commit([]*newFile{staged})
		}
		if err != nil {
			t.Fatal(err)
		}
		f.again()
		if err := f.load(); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.read("a"); got != "old new" {
		t.Errorf("%q", got)
	}
}

// Files have the content that they would have if each were written alone: the last one of a path wins, also through a link, and
// an append follows the files before it.
func TestFileOrder(t *testing.T) {
	f := newFixture(t)
	for _, folder := range []string{"run", "var"} {
		if err := os.MkdirAll(f.path(folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../run", f.path("var/run")); err != nil {
		t.Fatal(err)
	}
	f.give(f.expand(`
write_files:
- {path: /a, content: "1"}
- {path: /a, content: "2"}
- {path: /var/run/b, content: "1"}
- {path: /run/b, content: "2"}
- {path: /a, content: "3", append: true}
- {path: /new/folder/c, content: "1", permissions: '0640'}
runcmd:
` + sentinel))
	if state, message, _ := f.apply(); state != initapi.Succeeded {
		t.Fatal(message)
	}
	if a, b, c := f.read("a"), f.read("run/b"), f.read("new/folder/c"); a != "23" || b != "2" || c != "1" {
		t.Errorf("%q, %q, %q", a, b, c)
	}
	if info, err := os.Stat(f.path("new/folder/c")); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v %v", info, err)
	}
	_ = filepath.WalkDir(f.dir, func(path string, _ fs.DirEntry, _ error) error {
		if strings.Contains(path, ".capstan-tmp") {
			t.Errorf("%s is left over", path)
		}
		return nil
	})
}

// WriteFile follows no link that a user of the machine has planted in an own folder.
func TestWriteFileAvoidsLinks(t *testing.T) {
	for name, tt := range map[string]struct{ planted, path string }{
		"temporary file": {"home/ann/.profile.capstan-tmp0", "/home/ann/.profile"},
		"file":           {"home/ann/.profile", "/home/ann/.profile"},
		"folder":         {"home/ann/etc", "/home/ann/etc/victim"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			victim := f.path("etc/victim")
			target := victim
			if name == "folder" {
				target = filepath.Dir(victim)
			}
			if err := errors.Join(os.MkdirAll(f.path("home/ann"), 0o700), os.MkdirAll(filepath.Dir(victim), 0o700),
				os.WriteFile(victim, []byte("kept"), 0o600), os.Chown(f.path("home/ann"), 1000, 1000), os.Symlink(target, f.path(tt.planted))); err != nil {
				t.Fatal(err)
			}
			err := WriteFile(f.Root, cloudconfig.File{Path: tt.path, Content: []byte("new"), Owner: "1000:1000", Mode: 0o666})
			if (err != nil) != (name == "folder") {
				t.Errorf("written: %v", err)
			}
			info, err := os.Lstat(victim)
			if err != nil {
				t.Fatal(err)
			}
			if uid := info.Sys().(*syscall.Stat_t).Uid; f.read("etc/victim") != "kept" || info.Mode() != 0o600 || uid != 0 {
				t.Errorf("the other file became %q, %s, owner %d", f.read("etc/victim"), info.Mode(), uid)
			}
		})
	}
}

// An append to a file in a folder of a user reads no other file. A link in a folder of root leads to the content to which it appends.
func TestAppendAvoidsLinks(t *testing.T) {
	for path, tt := range map[string]struct {
		link, want string
		ok         bool
	}{
		"/home/ann/.profile": {"../../etc/key", "secret ", false},
		"/etc/profile":       {"key", "secret new", true},
	} {
		f := newFixture(t)
		err := errors.Join(os.MkdirAll(f.path("home/ann"), 0o700), os.Mkdir(f.path("etc"), 0o700), os.WriteFile(f.path("etc/key"), []byte("secret "), 0o600),
			os.Chown(f.path("home/ann"), 1000, 1000), os.Symlink(tt.link, f.path(path)), f.load())
		if err != nil {
			t.Fatal(err)
		}
		staged, err := f.stage(step{name: "step", file: &cloudconfig.File{Path: path, Content: []byte("new"), Append: true, Mode: 0o600}}, 0)
		if err == nil {
			err = commit([]*newFile{staged})
		}
		if got := f.read(path); (err == nil) != tt.ok || got != tt.want {
			t.Errorf("%s became %q: %v", path, got, err)
		}
		if got := f.read("etc/key"); got != "secret " {
			t.Errorf("the other file became %q", got)
		}
	}
}

// A home that users of other machines can write to gives its user no folder outside of it.
func TestEnsureOwned(t *testing.T) {
	for _, planted := range []bool{false, true} {
		dir := t.TempDir()
		home, etc := filepath.Join(dir, "home"), filepath.Join(dir, "etc")
		if err := errors.Join(os.Mkdir(home, 0o700), os.Mkdir(etc, 0o755), os.Chown(home, 1000, 1000)); err != nil {
			t.Fatal(err)
		}
		owned := filepath.Join(home, ".ssh")
		if planted {
			owned = etc
			if err := os.Symlink("../etc", filepath.Join(home, ".ssh")); err != nil {
				t.Fatal(err)
			}
		}
		if err := ensureOwned(dir, "/home/.ssh", 1000, 1000); (err != nil) != planted {
			t.Errorf("planted %v: %v", planted, err)
		}
		info, err := os.Lstat(owned)
		if err != nil {
			t.Fatal(err)
		}
		if uid := info.Sys().(*syscall.Stat_t).Uid; (uid == 1000) == planted {
			t.Errorf("planted %v: %s has the owner %d", planted, owned, uid)
		}
	}
}

// The files before one with an error are written and recorded, those after it are not.
func TestFilesBeforeAnError(t *testing.T) {
	f := newFixture(t)
	f.give("write_files: [{path: /a, content: a}, {path: /b, content: b}, {path: /a/c}, {path: /d, content: d}]")
	if err := os.WriteFile(f.path("a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	state, message, _ := f.apply()
	if state != initapi.Failed || !strings.HasPrefix(message, "write_files[2] /a/c: ") {
		t.Errorf("%s: %s", state, message)
	}
	if a, b, d := f.read("a"), f.read("b"), f.read("d"); a != "a" || b != "b" || d != "" {
		t.Errorf("%q, %q, %q", a, b, d)
	}
	if want := []string{"write_files[0] /a", "write_files[1] /b"}; !slices.Equal(f.record.Done, want) {
		t.Errorf("recorded %v", f.record.Done)
	}
}

func TestTogether(t *testing.T) {
	file := func(f cloudconfig.File) step { return step{file: &f} }
	plain, many := file(cloudconfig.File{}), make([]step, 2*mostTogether)
	for i := range many {
		many[i] = plain
	}
	for name, tt := range map[string]struct {
		steps []step
		want  int
	}{
		"no file":                {[]step{{}, plain}, 1},
		"files":                  {[]step{plain, file(cloudconfig.File{Owner: "root:root"}), {}}, 2},
		"an append ends them":    {[]step{plain, file(cloudconfig.File{Append: true})}, 1},
		"an append begins them":  {[]step{file(cloudconfig.File{Append: true}), plain}, 2},
		"an owner ends them":     {[]step{plain, file(cloudconfig.File{Owner: "etcd"})}, 1},
		"too many for one batch": {many, mostTogether},
	} {
		if got := together(tt.steps); got != tt.want {
			t.Errorf("%s: %d, want %d", name, got, tt.want)
		}
	}
}

func TestFailures(t *testing.T) {
	for name, tt := range map[string]struct{ data, want string }{
		"refused data":       {"packages: [a]", "nothing was done: line 2: packages is not supported"},
		"unknown owner":      {"write_files: [{path: /a, owner: nobody-knows}]", "write_files[0] /a: owner"},
		"script ended early": {"runcmd: ['exit 0', 'echo never']", "runcmd: [0]: ended the script with exit code 0"},
		"syntax error":       {"runcmd: ['true', 'if then']", "runcmd: [1]: exit code 2"},
		"program not found":  {"runcmd: [[/does/not/exist]]", "runcmd: [0]: exit code 127"},
		"bootcmd":            {"bootcmd: ['exit 4']\nruncmd: ['true']", "bootcmd: [0]: exit code 4"},
		"killed":             {"runcmd: ['kill -9 $$']", "runcmd: [0]: exit code 137"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.give(tt.data)
			state, message, _ := f.apply()
			if state != initapi.Failed || !strings.Contains(message, tt.want) {
				t.Errorf("%s: %s", state, message)
			}
			if _, err := os.Stat(f.DataPath); err == nil {
				t.Error("the data still exists")
			}
		})
	}
}

// IM-08: data and sentinel can arrive late. The bootstrap waits for both without polling and does nothing before.
func TestWaits_IM08(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	f.Run(ctx, func(state initapi.Bootstrap, message string) {
		switch state {
		case initapi.Waiting:
			f.give("runcmd: ['(sleep 0.2; echo success > " + f.Sentinel + ") >/dev/null 2>&1 &']")
		case initapi.Succeeded:
			if _, err := os.Stat(f.Sentinel); err != nil {
				t.Errorf("the end was reported before the sentinel existed: %v", err)
			}
		case initapi.Failed:
			t.Error(message)
		}
	})
	if ctx.Err() != nil || f.record.Result != initapi.Succeeded {
		t.Errorf("%v, %s", ctx.Err(), f.record.Result)
	}
}

// restart simulates the next PID 1 of the same machine: /run is empty, and the machine has its data again.
func (f *fixture) restart(data string) {
	f.t.Helper()
	if err := os.RemoveAll(f.path("run")); err != nil {
		f.t.Fatal(err)
	}
	f.give(data)
	f.again()
}

// dieAfterSteps runs all steps and stops before the check for the sentinel.
func (f *fixture) dieAfterSteps(data string) {
	f.t.Helper()
	config, err := cloudconfig.Parse([]byte("#cloud-config\n"+data), f.Metadata.TemplateVariables())
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.load(); err != nil {
		f.t.Fatal(err)
	}
	if _, err := f.doSteps(f.t.Context(), f.steps(config)); err != nil {
		f.t.Fatal(err)
	}
}

// IM-08: the sentinel is on a tmpfs. A machine that dies between its last command and the check for the sentinel
// counts as bootstrapped.
func TestSentinelIsLost(t *testing.T) {
	for name, c := range map[string]struct {
		data    string
		state   initapi.Bootstrap
		message string
	}{
		"written by the last command":   {"runcmd:\n- echo one >> $DIR/list\n" + sentinel, initapi.Succeeded, ""},
		"written by an earlier command": {"runcmd:\n" + sentinel + "- echo one >> $DIR/list\n", initapi.Succeeded, ""},
		"not written by a command":      {"runcmd:\n- echo one >> $DIR/list\n", initapi.Failed, "restarted before"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			data := f.expand(c.data)
			f.give(data)
			f.dieAfterSteps(data)
			f.restart(data)
			if state, message, _ := f.apply(); state != c.state || !strings.Contains(message, c.message) {
				t.Errorf("%s: %s", state, message)
			}
			if _, err := os.Stat(f.DataPath); err == nil {
				t.Error("the data still exists")
			}
			if got := f.read("list"); got != "one\n" {
				t.Errorf("list %q", got)
			}
		})
	}
}

// A record that a power failure damaged counts as empty. capstand writes the data again if it still has it.
// Row IM-08.
func TestUselessRecord(t *testing.T) {
	for _, content := range []string{"", "{", "7", "\x00\x00"} {
		f := newFixture(t)
		f.give(f.expand("runcmd:\n" + sentinel))
		if err := os.MkdirAll(f.path("var"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f.RecordPath, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if state, message, _ := f.apply(); state != initapi.Succeeded {
			t.Errorf("%q: %s: %s", content, state, message)
		}
		if !strings.Contains(f.log.String(), "cannot use the record") {
			t.Errorf("%q: the log does not report it: %s", content, f.log.String())
		}
	}
}

// A disk of another machine does not count as bootstrapped.
func TestOtherMachine(t *testing.T) {
	f := newFixture(t)
	f.give("runcmd:\n" + f.expand(sentinel))
	if state, message, _ := f.apply(); state != initapi.Succeeded {
		t.Fatal(message)
	}
	f.again().Metadata.ID = "other"
	if err := f.load(); err != nil || f.record.Result != "" || len(f.record.Done) != 0 {
		t.Errorf("%+v, %v", f.record, err)
	}
}

func TestErase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(path, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	// A process that has the file open reads zeros.
	open, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := Erase(path); err != nil {
		t.Fatal(err)
	}
	content := make([]byte, 6)
	if _, err := open.Read(content); err != nil || string(content) != "\x00\x00\x00\x00\x00\x00" {
		t.Errorf("%q, %v", content, err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("%v, want %v", err, fs.ErrNotExist)
	}
	if err := Erase(path); err != nil {
		t.Error(err)
	}
}

// A useradd that was killed may have made the account without its groups. An account of the image keeps its groups.
func TestInterruptedUseradd(t *testing.T) {
	programs := t.TempDir()
	calls := filepath.Join(programs, "calls")
	for _, name := range []string{"useradd", "usermod", "groupadd"} {
		expect.NoError(t, os.WriteFile(filepath.Join(programs, name), []byte("#!/bin/sh\necho \"${0##*/} $*\" >>"+calls+"\n"), 0o700))
	}
	t.Setenv("PATH", programs+":"+os.Getenv("PATH"))
	for name, test := range map[string]struct {
		user  string
		begun []string
		want  string
	}{
		"of the image":    {"daemon", nil, ""},
		"was interrupted": {"daemon", []string{"daemon"}, "groupadd --force capstan-none\nusermod --append --groups=audio,capstan-none daemon\n"},
		"does not exist":  {"capstan-nobody", nil, "groupadd --force capstan-none\nuseradd --create-home --user-group --groups=audio,capstan-none capstan-nobody\n"},
		"not made at all": {"capstan-nobody", []string{"capstan-nobody"}, "groupadd --force capstan-none\nuseradd --create-home --user-group --groups=audio,capstan-none capstan-nobody\n"},
	} {
		expect.NoError(t, atomicfile.Remove(calls))
		r := newFixture(t).Runner
		r.record.Accounts = test.begun
		expect.NoError(t, os.MkdirAll(filepath.Dir(r.LogPath), 0o755))
		expect.NoError(t, r.makeAccount(t.Context(), cloudconfig.User{Name: test.user, Groups: []string{"audio", "capstan-none"}}))
		got, err := os.ReadFile(calls)
		if atomicfile.IgnoreMissing(err) != nil || string(got) != test.want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestUseraddArgs(t *testing.T) {
	got := strings.Join(useraddArgs(cloudconfig.User{
		Name: "ann", Gecos: "Ann A", Groups: []string{"a, b", "c"}, HomeDir: "/h", Shell: "/bin/sh", PrimaryGroup: "g", Inactive: "3", Passwd: "$6$hash",
	}), " ")
	if got != "--create-home --comment=Ann A --groups=a,b,c --home-dir=/h --inactive=3 --shell=/bin/sh --gid=g ann" {
		t.Error(got)
	}
}

// A missing home in a folder that others can write to gives its user no folder to which a planted link leads.
func TestEnsureHomeAvoidsLinks(t *testing.T) {
	for planted, home := range map[string]string{"people/.capstan-ann": "/people/ann", "people/team": "/people/team/ann"} {
		root := t.TempDir()
		bob := filepath.Join(root, "people/bob")
		if err := errors.Join(os.MkdirAll(bob, 0o700), os.Mkdir(filepath.Join(root, "etc"), 0o755), os.Chown(filepath.Dir(bob), 1000, 1000)); err != nil {
			t.Fatal(err)
		}
		target, ok := "bob", true
		if home != "/people/ann" {
			target, ok = "../etc", false
		}
		if err := os.Symlink(target, filepath.Join(root, planted)); err != nil {
			t.Fatal(err)
		}
		if err := ensureHome(root, home, 1000, 1000); (err == nil) != ok {
			t.Errorf("%s: %v", planted, err)
		}
		info, err := os.Stat(bob)
		if err != nil || info.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Errorf("the other home: %v, %v", info, err)
		}
		if entries, err := os.ReadDir(filepath.Join(root, "etc")); err != nil || len(entries) > 0 {
			t.Errorf("the other folder has %v, %v", entries, err)
		}
	}
}

func TestGroupaddArgs(t *testing.T) {
	user := cloudconfig.User{Name: "ann", Groups: []string{"a, b", "root"}, PrimaryGroup: "g"}
	var got []string
	for _, args := range groupaddArgs(user, func(name string) bool { return name == "root" }) {
		got = append(got, strings.Join(args, " "))
	}
	if has := strings.Join(got, "; "); has != "groupadd --force a; groupadd --force b; groupadd --force g" {
		t.Error(has)
	}
}

// TestEnsureHome: a folder that exists is not touched, a missing one is made with its parents.
func TestEnsureHome(t *testing.T) {
	root := t.TempDir()
	home := filepath.Join(root, "people", "ann")
	for range 2 {
		if err := ensureHome(root, "/people/ann", os.Getuid(), os.Getgid()); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(home); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%v, %v", info, err)
		}
	}
	if entries, err := os.ReadDir(filepath.Dir(home)); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
}
