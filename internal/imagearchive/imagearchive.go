// Package imagearchive reads which images an OCI or Docker archive contains, by the rules of the machines that import it. It does not
// unpack anything, and needs no container runtime.
//
// Layer: library. Allowed imports: api.
package imagearchive

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/distribution/reference"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// MaxArchives bounds the archives of a folder that machines import.
	MaxArchives = 64
	// MaxFiles is the largest number of files of an archive. An image has at most 127 layers.
	MaxFiles = 10_000
	// maxJSON bounds the list of the images of an archive.
	maxJSON = 8 << 20
)

// annotationName is the full name of an image in the index of an archive, as containerd and Docker write it.
const annotationName = "io.containerd.image.name"

// dockerManifest is the list of the images of an archive that is no OCI image layout.
const dockerManifest = "manifest.json"

// Folder returns the paths of the archives NAME.tar in a folder, in their order. Names that begin with a dot are ignored. A missing
// folder is empty.
func Folder(dir string) ([]string, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the archives of container images: %w", err)
	}
	var out []string
	for _, file := range files {
		name := file.Name()
		if file.Type().IsRegular() && strings.HasSuffix(name, ".tar") && !strings.HasPrefix(name, ".") {
			out = append(out, filepath.Join(dir, name))
		}
	}
	if len(out) > MaxArchives {
		return out[:MaxArchives], fmt.Errorf("expected at most %d archives in %s, found %d: the first ones by name are imported", MaxArchives, dir, len(out))
	}
	return out, nil
}

// Name returns the full name of an image by its annotations in the index of an archive, or "". skopeo and podman write the name that the
// user gave to the annotation of OCI, which can also be a tag only.
func Name(annotations map[string]string) string {
	if name := annotations[annotationName]; name != "" {
		return name
	}
	name := annotations[v1.AnnotationRefName]
	if full, err := reference.ParseNamed(name); err != nil || reference.IsNameOnly(full) {
		return ""
	}
	return name
}

// MagicBytes is the number of bytes at the start of a file that CheckCompression needs.
const MagicBytes = 10

// compressions are the first bytes of files by the program that compresses, as it does by default.
var compressions = map[string]string{"gzip": "\x1f\x8b", "zstd": "\x28\xb5\x2f\xfd", "xz": "\xfd7zXZ\x00", "bzip2": "BZh91AY&SY"}

// CheckCompression returns an error if a file with this start is compressed. Machines import uncompressed archives only.
func CheckCompression(start []byte) error {
	for program, magic := range compressions {
		if strings.HasPrefix(string(start), magic) {
			return fmt.Errorf("expected an uncompressed tar archive of images, found a file of %s: decompress it with `%s -d`", program, program)
		}
	}
	return nil
}

// Names returns the sorted names of the images in an archive. It reads the headers of its files, and skips their content.
func Names(archive io.ReadSeeker) ([]string, error) {
	files, err := lists(archive)
	if err != nil {
		return nil, err
	}
	var names []string
	switch {
	case files[v1.ImageLayoutFile] != nil && files[v1.ImageIndexFile] == nil:
		return nil, fmt.Errorf("expected the file %s in the OCI archive, found none: the archive is incomplete", v1.ImageIndexFile)
	case files[v1.ImageLayoutFile] != nil:
		names, err = ociNames(files[v1.ImageIndexFile])
	case files[dockerManifest] != nil:
		names, err = dockerNames(files[dockerManifest])
	default:
		return nil, errors.New("expected an OCI or Docker archive of images, found another tar archive: make it with `skopeo copy` or `docker save`")
	}
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, errors.New("expected an image with a full name, found none: save the image with its name, for example with `docker save NAME:TAG`")
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// lists returns the files of an archive that list its images.
func lists(archive io.ReadSeeker) (map[string][]byte, error) {
	found := map[string][]byte{}
	files := tar.NewReader(archive)
	for n := 0; ; n++ {
		file, err := files.Next()
		switch {
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil:
			return nil, fmt.Errorf("expected an uncompressed tar archive of images: %w", err)
		case n == MaxFiles:
			return nil, fmt.Errorf("expected at most %d files in the archive, found more", MaxFiles)
		}
		name := path.Clean(file.Name)
		if file.Typeflag != tar.TypeReg || name != v1.ImageLayoutFile && name != v1.ImageIndexFile && name != dockerManifest {
			continue
		}
		if file.Size > maxJSON {
			return nil, fmt.Errorf("expected at most %d bytes in %s, found %d", maxJSON, name, file.Size)
		}
		if found[name], err = io.ReadAll(files); err != nil {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
	}
}

func ociNames(data []byte) (names []string, err error) {
	var index v1.Index
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, fmt.Errorf("%s: %w", v1.ImageIndexFile, err)
	}
	for _, manifest := range index.Manifests {
		if name := Name(manifest.Annotations); name != "" {
			names = append(names, name)
		}
	}
	return names, nil
}

func dockerNames(data []byte) (names []string, err error) {
	var manifests []struct{ RepoTags []string }
	if err := json.Unmarshal(data, &manifests); err != nil {
		return nil, fmt.Errorf("%s: %w", dockerManifest, err)
	}
	for _, manifest := range manifests {
		for _, tag := range manifest.RepoTags {
			full, err := reference.ParseDockerRef(tag)
			if err != nil {
				return nil, fmt.Errorf("%s: %.200q: %w", dockerManifest, tag, err)
			}
			names = append(names, full.String())
		}
	}
	return names, nil
}
