// mkimage writes an OCI image archive around one static binary, without Docker
// and without a registry:
//
//	mkimage -name registry.example/pause:v1 -out pause.tar [-user 65532:65532] [-file host:image] [-link target:image]
//		[-folder image] [-no-entrypoint] binary [argument...]
//
// The arguments become the image's command. Several names give one image several names. The same input gives the same bytes.
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
	out, user string
	names     []string
	// files are "path on this host:absolute path in the image".
	files []string
	// links are "target:absolute path of the symbolic link in the image".
	links []string
	// folders are absolute paths in the image. Every user can write in them.
	folders []string
	// noEntrypoint makes the arguments the whole command, as in images with many programs.
	noEntrypoint bool
}

func main() {
	var o options
	flag.StringVar(&o.out, "out", "", "archive to write")
	flag.StringVar(&o.user, "user", "65532:65532", "uid:gid of the process")
	flag.BoolVar(&o.noEntrypoint, "no-entrypoint", false, "the arguments are the whole command: the binary is not its first word")
	repeatable("name", "image name with tag", &o.names)
	repeatable("file", "one more file, host-path:image-path", &o.files)
	repeatable("link", "one symbolic link, target:image-path", &o.links)
	repeatable("folder", "one folder in the image that every user can write, such as /tmp", &o.folders)
	flag.Parse()
	if err := run(o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mkimage:", err)
		os.Exit(1)
	}
}

func repeatable(name, usage string, values *[]string) {
	flag.Func(name, usage+" (repeatable)", func(s string) error {
		*values = append(*values, s)
		return nil
	})
}

func run(o options, args []string) error {
	if o.out == "" || len(o.names) == 0 || len(args) == 0 {
		return fmt.Errorf("-out, -name and a binary are needed")
	}
	var tags []name.Tag
	for _, n := range o.names {
		tag, err := name.NewTag(n, name.StrictValidation)
		if err != nil {
			return fmt.Errorf("-name: %w", err)
		}
		tags = append(tags, tag)
	}
	image, err := build(o, args[0], args[1:])
	if err != nil {
		return err
	}
	return writeArchive(image, tags, o.out)
}

func build(o options, binary string, arguments []string) (v1.Image, error) {
	entrypoint := "/" + filepath.Base(binary)
	o.files = append([]string{binary + ":" + entrypoint}, o.files...)
	layer, err := filesLayer(o)
	if err != nil {
		return nil, err
	}
	image, err := mutate.Append(mutate.MediaType(
		mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1),
		mutate.Addendum{Layer: layer, MediaType: types.OCILayer, History: v1.History{
			Created: v1.Time{Time: epoch}, CreatedBy: "mkimage"}})
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Created = v1.Time{Time: epoch}
	config.Config = v1.Config{Entrypoint: []string{entrypoint}, Cmd: arguments, User: o.user, WorkingDir: "/"}
	if o.noEntrypoint {
		config.Config.Entrypoint = nil
	}
	return mutate.ConfigFile(image, config)
}

func filesLayer(o options) (v1.Layer, error) {
	var buf bytes.Buffer
	l := layerWriter{tar: tar.NewWriter(&buf), folders: map[string]bool{"/": true}}
	for _, folder := range o.folders {
		if err := l.folder(folder, 0o1777); err != nil {
			return nil, err
		}
	}
	for _, f := range o.files {
		if err := l.each(f, l.file); err != nil {
			return nil, err
		}
	}
	for _, link := range o.links {
		if err := l.each(link, l.link); err != nil {
			return nil, err
		}
	}
	if err := l.tar.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buf.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

type layerWriter struct {
	tar     *tar.Writer
	folders map[string]bool // those that are in the layer
}

// each writes one "from:to" with the folders above it.
func (l layerWriter) each(pair string, write func(from, to string) error) error {
	from, to, ok := strings.Cut(pair, ":")
	if !ok || !path.IsAbs(to) {
		return fmt.Errorf("%q: want host-path:/image-path or link-target:/image-path", pair)
	}
	for _, folder := range parents(to) {
		if err := l.folder(folder, 0o755); err != nil {
			return err
		}
	}
	return write(from, path.Clean(to)[1:])
}

func (l layerWriter) folder(folder string, mode int64) error {
	if !path.IsAbs(folder) {
		return fmt.Errorf("folder %q: want an absolute path", folder)
	}
	folder = path.Clean(folder)
	if l.folders[folder] {
		return nil
	}
	l.folders[folder] = true
	return l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: folder[1:] + "/", Mode: mode, ModTime: epoch})
}

// file copies a file. It keeps whether the file is executable and whether it changes the user.
func (l layerWriter) file(from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	mode := int64(0o644)
	if info.Mode()&0o111 != 0 {
		mode = 0o755
	}
	if info.Mode()&fs.ModeSetuid != 0 {
		mode |= 0o4000
	}
	return addFile(l.tar, to, mode, content)
}

func (l layerWriter) link(target, to string) error {
	return l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: to, Linkname: target, Mode: 0o777, ModTime: epoch})
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
func writeArchive(image v1.Image, tags []name.Tag, out string) error {
	folder, err := os.MkdirTemp(filepath.Dir(out), ".mkimage-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)

	index, err := layout.Write(filepath.Join(folder, "layout"), empty.Index)
	if err != nil {
		return err
	}
	for _, tag := range tags {
		if err := index.AppendImage(image, layout.WithAnnotations(map[string]string{
			"io.containerd.image.name":          tag.Name(), // containerd
			"org.opencontainers.image.ref.name": tag.TagStr(),
		})); err != nil {
			return err
		}
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
