package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/foreignfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/refusal"
)

// maxInitLog is the largest size of an init log. Twice as much is kept: the current file and the previous one.
const maxInitLog = 8 << 20

// openLog opens an init log for writing. Writers append, so that capstand can truncate the file while they write.
func openLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
}

// capLog keeps a log smaller than maxInitLog until ctx is done. The writer keeps the file open, so capLog copies and
// truncates the file instead of renaming it. A line that is written in between can be lost.
func capLog(ctx context.Context, path string, log *slog.Logger) {
	for changed := changes.Of(ctx, path); ; {
		if err := cutLog(path, maxInitLog); err != nil {
			log.Error("Cannot truncate a log", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// capProcessLogs keeps the logs of the guard, and of the process of the encrypted link, smaller than maxInitLog until ctx is done.
func (h *Host) capProcessLogs(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { capLog(ctx, h.fence.GuardLog(), h.log) })
	if link := h.box.Link; link != nil {
		all.Go(func() { capLog(ctx, link.Log(), h.log) })
	}
	all.Wait()
}

// cutLog keeps the last part of a log, of at most the size most, as the previous file. PID 1 of a machine has the log open, and root in the
// machine can make it larger than the memory of the host.
func cutLog(path string, most int64) error {
	file, err := os.Open(path)
	if err != nil {
		return atomicfile.IgnoreMissing(err)
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil || info.Size() <= most {
		return err
	}
	data, err := io.ReadAll(io.NewSectionReader(file, info.Size()-most, most))
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(path+".1", data, 0o600), os.Truncate(path, 0))
}

// Logs streams a log of a machine.
func (ms *machines) Logs(req *hostpb.LogsRequest, stream hostpb.Host_LogsServer) error {
	m, err := ms.get(req.Machine)
	if err != nil {
		return err
	}
	reading := m.reading() // before the file is open
	file, err := m.openServiceLog(req.Service)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if req.TailLines > 0 {
		if err := seekTail(file, int(req.TailLines)); err != nil {
			return err
		}
	}
	ctx, stop := context.WithCancel(stream.Context())
	defer stop()
	// A client that does not read holds up Send without a limit.
	defer context.AfterFunc(reading, func() { stop(); _ = file.Close() })()
	err = follow(ctx, file, req.Follow, func(data []byte) error {
		return stream.Send(&hostpb.LogChunk{Data: data})
	})
	if reading.Err() != nil {
		return nil
	}
	return err
}

// reading is done when readers of the machine's disk must close their files.
func (m *machine) reading() context.Context {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reads
}

// endReads closes the files of readers: an open file keeps the disk in use.
func (m *machine) endReads() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stopReads()
	m.reads, m.stopReads = context.WithCancel(m.deleted)
}

// openServiceLog opens the log of a service, or of init.
func (m *machine) openServiceLog(service string) (*os.File, error) {
	if service == "init" {
		file, err := os.Open(m.initLog())
		return file, noLog(err, "init", m.spec)
	}
	if err := admission.CheckService(service); err != nil {
		return nil, err
	}
	file, err := foreignfile.Open(m.rootfs(), "var/log/capstan/"+service+".log")
	return file, noLog(err, service, m.spec)
}

func noLog(err error, service string, spec *hostpb.MachineSpec) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return refusal.Errorf(hostpb.Refusal_NOT_FOUND, "machine %s/%s has no log of service %q yet", spec.Namespace, spec.Name, service)
	}
	return status.Errorf(codes.Internal, "reading the log of service %q: %v", service, err)
}

// follow sends the content of the file and, on request, additions until ctx is done. It reads a truncated file from the
// start.
func follow(ctx context.Context, file *os.File, on bool, send func([]byte) error) error {
	if !on {
		return sendRest(file, send)
	}
	// Watch the folder of the open file, because the path can lead to another folder by now.
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", file.Fd()))
	if err != nil {
		return err
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	for changed := changes.Of(watching, path); ; {
		if err := sendRest(file, send); err != nil {
			return err
		}
		if replaced(path, file) {
			return sendRest(file, send)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// replaced reports whether the path no longer leads to the open file. Its writer opens a new one then.
func replaced(path string, file *os.File) bool {
	open, err := file.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(path)
	return err != nil || !os.SameFile(open, now)
}

func sendRest(file *os.File, send func([]byte) error) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	at, err := file.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	if info.Size() < at {
		if _, err := file.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
	buffer := make([]byte, 64<<10)
	for {
		n, err := file.Read(buffer)
		if n > 0 {
			if err := send(bytes.Clone(buffer[:n])); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// maxTail is the part of a log in which seekTail looks for lines, in bytes. A machine can have a log of any size without a line.
const maxTail = 64 << 20

// seekTail moves to the start of the last n lines, or of the last maxTail bytes.
func seekTail(file *os.File, n int) error {
	at, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	const step = 16 << 10
	lines, last, from := 0, true, max(0, at-maxTail)
	for at > from {
		size := min(at, step)
		block := make([]byte, size)
		if _, err := file.ReadAt(block, at-size); err != nil {
			return err
		}
		for i := len(block) - 1; i >= 0; i-- {
			end := last
			last = false
			if block[i] != '\n' || end { // The newline at the end of the last line starts no further line.
				continue
			}
			if lines++; lines == n {
				_, err := file.Seek(at-size+int64(i)+1, io.SeekStart)
				return err
			}
		}
		at -= size
	}
	_, err = file.Seek(at, io.SeekStart)
	return err
}
