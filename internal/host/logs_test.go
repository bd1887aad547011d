package host

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network/wireguard"
	"capstan.dev/capstan/internal/testenv/expect"
)

func TestSeekTail(t *testing.T) {
	long := strings.Repeat("a line that is there many times\n", 5000)
	for _, test := range []struct {
		text string
		n    int
		want string
	}{
		{"one\ntwo\nthree\n", 2, "two\nthree\n"},
		{"one\ntwo\nthree", 2, "two\nthree"},
		{"one\ntwo\n", 9, "one\ntwo\n"},
		{"\n\n\n", 1, "\n"},
		{"", 1, ""},
		{long + "last\n", 1, "last\n"},
		{long, 1000, long[len(long)-32*1000:]},
	} {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := seekTail(file, test.n); err != nil {
			t.Fatal(err)
		}
		var got strings.Builder
		if err := sendRest(file, func(b []byte) error { got.Write(b); return nil }); err != nil || got.String() != test.want {
			t.Errorf("last %d lines of %.20q…: got %d bytes %.40q, %v", test.n, test.text, got.Len(), got.String(), err)
		}
		_ = file.Close()
	}
}

// TestHugeLog: root in a machine makes a log of eight terabytes without a line. capstand keeps a part of it, and finds the last lines in a
// part of it.
func TestHugeLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	write(t, path, "")
	if err := os.Truncate(path, 8<<40); err != nil {
		t.Skipf("the file system has no large files: %v", err)
	}
	file, err := openLog(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if err := seekTail(file, 10); err != nil {
		t.Fatal(err)
	}
	if at, err := file.Seek(0, io.SeekCurrent); err != nil || at != 8<<40-maxTail {
		t.Errorf("the tail begins at %d, %v", at, err)
	}
	if _, err := file.WriteString("last line\n"); err != nil {
		t.Fatal(err)
	}
	if err := cutLog(path, 10); err != nil {
		t.Fatal(err)
	}
	kept, err := os.ReadFile(path + ".1")
	info, errStat := os.Stat(path)
	if err != nil || errStat != nil || string(kept) != "last line\n" || info.Size() != 0 {
		t.Errorf("kept %q and %v, %v, %v", kept, info, err, errStat)
	}
}

// A follower of a log receives new lines, also after a truncation. The log is truncated when it grows.
func TestFollowAndCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	writer, err := openLog(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	reader, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	got, done := make(chan string), make(chan error, 1)
	go func() {
		done <- follow(ctx, reader, true, func(b []byte) error { got <- string(b); return nil })
	}()
	write := func(text string) {
		t.Helper()
		if _, err := writer.WriteString(text); err != nil {
			t.Fatal(err)
		}
		if seen := <-got; seen != text {
			t.Errorf("wrote %q, followed %q", text, seen)
		}
	}
	write("first, longer line\n")
	if err := cutLog(path, 12); err != nil {
		t.Fatal(err)
	}
	write("second\n")
	if old, err := os.ReadFile(path + ".1"); err != nil || string(old) != "longer line\n" {
		t.Errorf("kept %q, %v", old, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The follower of a log ends when the writer continues in another file.
func TestFollowReplaced(t *testing.T) {
	for name, replace := range map[string]func(path string) error{
		"removed":  os.Remove,
		"replaced": func(path string) error { return atomicfile.WriteFile(path, []byte("new"), 0o600) },
	} {
		path := filepath.Join(t.TempDir(), "log")
		write(t, path, "old")
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		var got string
		err = follow(ctx, file, true, func(b []byte) error { got += string(b); return replace(path) })
		if err != nil || ctx.Err() != nil || got != "old" {
			t.Errorf("%s: followed %q, %v, %v", name, got, err, ctx.Err())
		}
		cancel()
		_ = file.Close()
	}
}

// The log of a service is a regular file of the machine. Links to the host's files and blocking files are refused.
func TestOpenServiceLog(t *testing.T) {
	m := onDisk(t, recorded(t))
	dir := filepath.Join(m.rootfs(), "var/log/capstan")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "kubelet.log"), "a line")
	write(t, filepath.Join(m.dir, "outside"), "the host's")
	if err := os.Symlink(filepath.Join(m.dir, "outside"), filepath.Join(dir, "link.log")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe.log"), 0o600); err != nil {
		t.Fatal(err)
	}
	for service, want := range map[string]codes.Code{"kubelet": codes.OK, "link": codes.Internal, "pipe": codes.Internal, "none": codes.NotFound} {
		file, err := m.openServiceLog(service)
		if status.Code(err) != want {
			t.Errorf("%s: %v, want %s", service, err, want)
		}
		if err == nil {
			_ = file.Close()
		}
	}
}

// stuckStream is the stream of a client that reads nothing until end is closed.
type stuckStream struct {
	grpc.ServerStream
	ctx          context.Context
	sending, end chan struct{}
}

func (s stuckStream) Context() context.Context { return s.ctx }

func (s stuckStream) Send(*hostpb.LogChunk) error {
	s.sending <- struct{}{}
	<-s.end
	return nil
}

// A client that follows a log and does not read holds up neither the removal of the machine nor the repair of its disk: the log is closed.
func TestStuckReader(t *testing.T) {
	for name, end := range map[string]func(*machine){"deleted": func(m *machine) { m.delete() }, "disk released": (*machine).endReads} {
		h := recorded(t)
		m := onDisk(t, h)
		h.machines.byID[m.spec.Id] = m
		path := filepath.Join(m.rootfs(), "var/log/capstan/kubelet.log")
		expect.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		write(t, path, "a line")
		stream := stuckStream{ctx: t.Context(), sending: make(chan struct{}), end: make(chan struct{})}
		done := make(chan error, 1)
		go func() {
			done <- h.Logs(&hostpb.LogsRequest{Machine: m.spec.Id, Service: "kubelet", Follow: true}, stream)
		}()
		<-stream.sending
		if !isOpen(t, path) {
			t.Errorf("%s: the log is not open while it is sent", name)
		}
		end(m)
		expect.True(t, name+": the log is closed", func() bool { return !isOpen(t, path) })
		close(stream.end)
		if err := <-done; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// isOpen reports whether this process has a file open.
func isOpen(t *testing.T, path string) bool {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	expect.NoError(t, err)
	return slices.ContainsFunc(open, func(fd os.DirEntry) bool {
		to, _ := os.Readlink("/proc/self/fd/" + fd.Name()) // A descriptor can be closed meanwhile.
		return to == path
	})
}

// The logs of processes that outlive capstand have a limit, also if they are created later.
func TestCapProcessLogs(t *testing.T) {
	h := recorded(t)
	openFence(t, h)
	h.box.Link = &wireguard.Link{Dir: t.TempDir()}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	h.running.Go(func() { h.capProcessLogs(ctx) })
	for _, path := range []string{h.fence.GuardLog(), h.box.Link.Log()} {
		if err := changes.WaitFor(ctx, filepath.Dir(path)); err != nil {
			t.Fatal(err)
		}
		writer, err := openLog(path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = writer.Write(make([]byte, maxInitLog+1))
		if err := errors.Join(err, writer.Close(), changes.WaitFor(ctx, path+".1")); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	cancel()
	h.Wait()
}
