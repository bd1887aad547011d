package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/machineimage"
	"capstan.dev/capstan/internal/imagearchive"
	"capstan.dev/capstan/internal/shorten"
)

// containerImages returns the folder with the archives that the machine imports, or "" without such a folder. It also returns "" if a
// user other than root can change the folder or an archive, because an image runs with the rights of the pods that use its name. While its
// file system hangs, the first start fails, because the bootstrap can need the images; a later start does without them.
func (m *machine) containerImages() (string, error) {
	dir := m.host.config.ContainerImages
	if dir == "" {
		return "", nil
	}
	// The folder can be in a file system that hangs. The end of capstand waits for the start of a machine.
	err := m.host.imageFolders.await(context.Background(), dir, func() error { return checkContainerImages(dir) })
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case errors.Is(err, errNoAnswer) && m.fresh():
		return "", fmt.Errorf("container images of the host for the first start: %w", err)
	case err != nil:
		m.log.Error("The machine starts without the container images of the host", "error", err)
		return "", nil
	}
	return dir, nil
}

// checkContainerImages returns an error if a user other than root can change the folder or an archive.
func checkContainerImages(dir string) error {
	files, err := os.ReadDir(dir)
	if err == nil {
		err = machineimage.CheckPrivate(dir)
	}
	for _, file := range files {
		err = errors.Join(err, machineimage.CheckPrivate(filepath.Join(dir, file.Name())))
	}
	return err
}

// keepContainerImages publishes the container images that an administrator adds or removes, until ctx ends. Machines that run do not
// get them.
func (ms *machines) keepContainerImages(ctx context.Context) {
	if ms.config.ContainerImages == "" {
		return
	}
	folder := archiveFolder{dir: ms.config.ContainerImages}
	var errs lastErrors
	keepLooking(ctx, func() {
		now, err := folder.look()
		if errs.news(folder.dir, err) {
			ms.log.Error("Some container images of the host are not offered to machines", "error", err)
		}
		ms.mu.Lock()
		defer ms.mu.Unlock()
		if !slices.EqualFunc(now, ms.containerArchives, func(a, b *hostpb.ContainerArchive) bool { return proto.Equal(a, b) }) {
			ms.log.Info("Container images changed", "archives", len(now))
			ms.containerArchives = now
			ms.broadcaster.Publish(events.Host(ms.info()))
		}
	})
}

// maxReportedNames and maxReportedProblem bound the report of an archive.
const (
	maxReportedNames   = 16
	maxReportedProblem = 256
)

// archiveFolder reads the archives of a folder. It reads an archive again only after a change.
type archiveFolder struct {
	dir  string
	read map[string]readArchive
}

type readArchive struct {
	// stamp is the state of the file that was read.
	stamp   string
	images  []string
	problem string
}

// look returns the archives of the folder. Machines get none of them while a user other than root can change the folder or an archive.
func (f *archiveFolder) look() ([]*hostpb.ContainerArchive, error) {
	paths, err := imagearchive.Folder(f.dir)
	unsafe := ""
	if wrong := checkContainerImages(f.dir); wrong != nil && !errors.Is(wrong, fs.ErrNotExist) {
		err, unsafe = errors.Join(err, wrong), wrong.Error()
	}
	read := map[string]readArchive{}
	var out []*hostpb.ContainerArchive
	for _, path := range paths {
		a := f.archive(path)
		read[path] = a
		archive := &hostpb.ContainerArchive{Name: filepath.Base(path), Images: a.images, Problem: shorten.To(a.problem, maxReportedProblem)}
		if unsafe != "" {
			archive.Images, archive.Problem = nil, shorten.To(unsafe, maxReportedProblem)
		}
		out = append(out, archive)
	}
	f.read = read
	return out, err
}

func (f *archiveFolder) archive(path string) readArchive {
	a := readArchive{}
	info, err := os.Lstat(path)
	if err == nil {
		a.stamp = fmt.Sprint(info.Size(), info.ModTime().UnixNano(), info.Mode())
		if before, ok := f.read[path]; ok && before.stamp == a.stamp {
			return before
		}
		a.images, err = namesIn(path)
		a.images = a.images[:min(len(a.images), maxReportedNames)]
	}
	if err != nil {
		a.problem = err.Error()
	}
	return a
}

func namesIn(path string) ([]string, error) {
	file, err := machineimage.Open(filepath.Dir(path), filepath.Base(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return imagearchive.Names(file)
}
