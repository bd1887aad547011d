package images

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"capstan.dev/capstan/internal/imagearchive"
)

// inspected passes an archive on while it checks the names in it.
type inspected struct {
	*io.PipeReader

	result chan error
}

// inspect returns a reader of the archive that fails at the first file whose name leads out of the archive. containerd stores
// files by their digests and would ignore the name, and an archive with such a name is no image of a well-meaning person.
func inspect(archive io.Reader) *inspected {
	out, in := io.Pipe()
	i := &inspected{PipeReader: out, result: make(chan error, 1)}
	go func() {
		err := copyChecked(in, archive)
		i.result <- err
		_ = in.CloseWithError(err) // nil is the end of the archive
	}()
	return i
}

// finish ends the inspection and returns the fault of the archive. The reader of the archive reads nothing afterwards.
func (i *inspected) finish() error {
	_ = i.CloseWithError(errStopped)
	if err := <-i.result; !errors.Is(err, errStopped) {
		return err
	}
	return nil
}

var errStopped = errors.New("the reader of the archive has stopped")

func copyChecked(out io.Writer, archive io.Reader) error {
	in := bufio.NewReader(archive)
	start, _ := in.Peek(imagearchive.MagicBytes) // An error occurs again.
	if err := imagearchive.CheckCompression(start); err != nil {
		return err
	}
	files := tar.NewReader(io.TeeReader(in, out))
	for n := 0; ; n++ {
		file, err := files.Next()
		switch {
		case errors.Is(err, io.EOF):
			_, err = io.Copy(out, in) // the padding after the end
			return err
		case errors.Is(err, tar.ErrHeader):
			return fmt.Errorf("expected a tar archive of images, found something else: %w", err)
		case err != nil:
			return fmt.Errorf("reading the archive: %w", err)
		case n == imagearchive.MaxFiles:
			return fmt.Errorf("expected at most %d files in the archive, found more", imagearchive.MaxFiles)
		case !filepath.IsLocal(file.Name):
			return fmt.Errorf("expected names inside of the archive, found %.200q", file.Name)
		case filepath.IsAbs(file.Linkname), file.Typeflag == tar.TypeSymlink && !filepath.IsLocal(filepath.Dir(file.Name)+"/"+file.Linkname):
			return fmt.Errorf("expected links inside of the archive, found %.200q to %.200q", file.Name, file.Linkname)
		}
	}
}
