package imagearchive

import (
	"archive/tar"
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// archiveOf makes an archive of files with their contents.
func archiveOf(t *testing.T, files ...string) *bytes.Reader {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for i := 0; i < len(files); i += 2 {
		if err := w.WriteHeader(&tar.Header{Name: files[i], Typeflag: tar.TypeReg, Size: int64(len(files[i+1])), Mode: 0o600}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(files[i+1])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(out.Bytes())
}

// indexOf is an index with one image for each annotation.
func indexOf(annotations ...string) string {
	var manifests []string
	for _, a := range annotations {
		manifests = append(manifests, fmt.Sprintf(`{"mediaType":"application/vnd.oci.image.manifest.v1+json","size":2,"annotations":{%s}}`, a))
	}
	return `{"schemaVersion":2,"manifests":[` + strings.Join(manifests, ",") + `]}`
}

const layout = `{"imageLayoutVersion":"1.0.0"}`

func TestNames(t *testing.T) {
	const containerd, oci = `"io.containerd.image.name":"%s"`, `"org.opencontainers.image.ref.name":"%s"`
	named := func(format, name string) string { return fmt.Sprintf(format, name) }
	for name, test := range map[string]struct {
		files []string
		want  []string
		wrong string
	}{
		"OCI, by containerd": {[]string{"./oci-layout", layout, "blobs/sha256/a", "content", "./index.json",
			indexOf(named(containerd, "registry.example.org/b:v1")+","+named(oci, "v1"), named(containerd, "registry.example.org/a:v1"))},
			[]string{"registry.example.org/a:v1", "registry.example.org/b:v1"}, ""},
		"OCI, by skopeo": {[]string{"oci-layout", layout, "index.json", indexOf(named(oci, "registry.example.org/team/app:v1"))},
			[]string{"registry.example.org/team/app:v1"}, ""},
		"OCI with a digest":          {[]string{"oci-layout", layout, "index.json", indexOf(named(oci, "registry.example.org/a@sha256:"+strings.Repeat("0", 64)))}, []string{"registry.example.org/a@sha256:" + strings.Repeat("0", 64)}, ""},
		"OCI with a tag only":        {[]string{"oci-layout", layout, "index.json", indexOf(named(oci, "v1"))}, nil, "expected an image with a full name"},
		"OCI with a short name":      {[]string{"oci-layout", layout, "index.json", indexOf(named(oci, "app:v1"))}, nil, "expected an image with a full name"},
		"OCI with a name and no tag": {[]string{"oci-layout", layout, "index.json", indexOf(named(oci, "registry.example.org/app"))}, nil, "expected an image with a full name"},
		"OCI without an index":       {[]string{"oci-layout", layout}, nil, "expected the file index.json"},
		"OCI with a bad index":       {[]string{"oci-layout", layout, "index.json", "{"}, nil, "index.json: unexpected end"},
		"OCI and Docker":             {[]string{"manifest.json", `[{"RepoTags":["x:y"]}]`, "oci-layout", layout, "index.json", indexOf(named(containerd, "registry.example.org/a:v1"))}, []string{"registry.example.org/a:v1"}, ""},
		"Docker":                     {[]string{"manifest.json", `[{"RepoTags":["app","app:v1"]},{"RepoTags":["app:v1","registry.example.org/b:v1"]}]`}, []string{"docker.io/library/app:latest", "docker.io/library/app:v1", "registry.example.org/b:v1"}, ""},
		"Docker with a bad name":     {[]string{"manifest.json", `[{"RepoTags":["A B"]}]`}, nil, `manifest.json: "A B"`},
		"another archive":            {[]string{"etc/passwd", "x"}, nil, "expected an OCI or Docker archive"},
		"a large list":               {[]string{"index.json", strings.Repeat(" ", maxJSON+1)}, nil, "expected at most 8388608 bytes in index.json"},
	} {
		got, err := Names(archiveOf(t, test.files...))
		if !slices.Equal(got, test.want) || (err != nil) != (test.wrong != "") || err != nil && !strings.Contains(err.Error(), test.wrong) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestNamesOfNoArchive(t *testing.T) {
	whole := archiveOf(t, "blobs/sha256/a", strings.Repeat("x", 4096), "index.json", "{}")
	half := make([]byte, 2048)
	if _, err := whole.Read(half); err != nil {
		t.Fatal(err)
	}
	var many []string
	for range MaxFiles + 1 {
		many = append(many, "a", "")
	}
	for name, test := range map[string]struct {
		archive *bytes.Reader
		wrong   string
	}{
		"text":       {bytes.NewReader([]byte(strings.Repeat("no archive ", 100))), "expected an uncompressed tar archive"},
		"gzip":       {bytes.NewReader(append([]byte{0x1f, 0x8b}, make([]byte, 600)...)), "expected an uncompressed tar archive"},
		"half":       {bytes.NewReader(half), "expected an uncompressed tar archive"},
		"many files": {archiveOf(t, many...), "expected at most 10000 files"},
	} {
		if got, err := Names(test.archive); got != nil || err == nil || !strings.Contains(err.Error(), test.wrong) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
