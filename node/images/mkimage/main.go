// mkimage writes an OCI image archive around one static binary, without Docker
// and without a registry:
//
//	mkimage -name registry.example/pause:v1 -out pause.tar [-user 65532:65532] [-file host:image] binary [argument...]
//
// The arguments become the image's command. The same input gives the same bytes.
// "ctr -n k8s.io images import" and "skopeo copy oci-archive:" read the result.
package main

import (
	"archive/tar"
	"bytes"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// epoch is the time of every file, so that a build can be repeated.
var epoch = time.Unix(0, 0).UTC()

type options struct {
	name, out, user string
	// files are "path on this host:absolute path in the image".
	files []string
}

func main() {
	var o options
	flag.StringVar(&o.name, "name", "", "image name with tag")
	flag.StringVar(&o.out, "out", "", "archive to write")
	flag.StringVar(&o.user, "user", "65532:65532", "uid:gid of the process")
	flag.Func("file", "one more file, host-path:image-path (repeatable)", func(s string) error {
		o.files = append(o.files, s)
		return nil
	})
	flag.Parse()
	if err := run(o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mkimage:", err)
		os.Exit(1)
	}
}

func run(o options, args []string) error {
	if o.out == "" || len(args) == 0 {
		return fmt.Errorf("-out and a binary are needed")
	}
	tag, err := name.NewTag(o.name, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("-name: %w", err)
	}
	binary, arguments := args[0], args[1:]
	entrypoint := "/" + filepath.Base(binary)

	layer, err := filesLayer(append([]string{binary + ":" + entrypoint}, o.files...))
	if err != nil {
		return err
	}
	image, err := mutate.Append(mutate.MediaType(
		mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1),
		mutate.Addendum{Layer: layer, MediaType: types.OCILayer, History: v1.History{
			Created: v1.Time{Time: epoch}, CreatedBy: "mkimage"}})
	if err != nil {
		return err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Created = v1.Time{Time: epoch}
	config.Config = v1.Config{Entrypoint: []string{entrypoint}, Cmd: arguments, User: o.user, WorkingDir: "/"}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return err
	}
	return writeArchive(image, tag, o.out)
}

func filesLayer(files []string) (v1.Layer, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	folders := map[string]bool{"/": true}
	for _, f := range files {
		from, to, ok := strings.Cut(f, ":")
		if !ok || !path.IsAbs(to) {
			return nil, fmt.Errorf("file %q: want host-path:/image-path", f)
		}
		for _, folder := range parents(to) {
			if folders[folder] {
				continue
			}
			folders[folder] = true
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: folder[1:] + "/", Mode: 0o755, ModTime: epoch}); err != nil {
				return nil, err
			}
		}
		info, err := os.Stat(from)
		if err != nil {
			return nil, err
		}
		content, err := os.ReadFile(from)
		if err != nil {
			return nil, err
		}
		mode := int64(0o644)
		if info.Mode()&0o111 != 0 {
			mode = 0o755
		}
		if err := addFile(w, path.Clean(to)[1:], mode, content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buf.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

// parents returns the folders above p, outermost first.
func parents(p string) []string {
	var out []string
	for d := path.Dir(path.Clean(p)); d != "/"; d = path.Dir(d) {
		out = append([]string{d}, out...)
	}
	return out
}

func addFile(w *tar.Writer, name string, mode int64, content []byte) error {
	if err := w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content)), ModTime: epoch,
	}); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}

// writeArchive writes the image as an OCI layout, then the layout as a tar: the
// manifest keeps its digest on import, which it does not in Docker's format.
func writeArchive(image v1.Image, tag name.Tag, out string) error {
	folder, err := os.MkdirTemp(filepath.Dir(out), ".mkimage-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)

	index, err := layout.Write(filepath.Join(folder, "layout"), empty.Index)
	if err != nil {
		return err
	}
	if err := index.AppendImage(image, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          tag.Name(), // containerd
		"org.opencontainers.image.ref.name": tag.TagStr(),
	})); err != nil {
		return err
	}

	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	root := os.DirFS(filepath.Join(folder, "layout"))
	// WalkDir goes in lexical order.
	if err := fs.WalkDir(root, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(root, p)
		if err != nil {
			return err
		}
		return addFile(w, p, 0o644, content)
	}); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	// The archive is renamed into place, so that no reader sees an incomplete one.
	temporary := filepath.Join(folder, "archive")
	if err := os.WriteFile(temporary, buf.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, out)
}
