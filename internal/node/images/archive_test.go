package images

import (
	"archive/tar"
	"bytes"
	"io"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/imagearchive"
)

func archiveOf(t *testing.T, files ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for i := range files {
		if err := w.WriteHeader(&files[i]); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, files[i].Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// An archive passes unchanged, or its reader gets an error that says what is wrong.
func TestInspect(t *testing.T) {
	good := archiveOf(t, tar.Header{Name: "blobs/sha256/a", Size: 70_000}, tar.Header{Name: "./index.json", Size: 3},
		tar.Header{Name: "a/layer.tar", Typeflag: tar.TypeSymlink, Linkname: "../b/layer.tar"})
	many := bytes.Repeat(archiveOf(t, tar.Header{Name: "a"})[:512], imagearchive.MaxFiles+1)
	for name, test := range map[string]struct {
		archive []byte
		wrong   string
	}{
		"good":                   {good, ""},
		"with padding":           {append(bytes.Clone(good), make([]byte, 10_240)...), ""},
		"parent folder":          {archiveOf(t, tar.Header{Name: "../etc/cron.d/a", Size: 1}), `found "../etc/cron.d/a"`},
		"hidden parent folder":   {archiveOf(t, tar.Header{Name: "a"}, tar.Header{Name: "blobs/../../a", Size: 1}), "inside of the archive"},
		"absolute":               {archiveOf(t, tar.Header{Name: "/etc/passwd", Size: 1}), `found "/etc/passwd"`},
		"link to parent folder":  {archiveOf(t, tar.Header{Name: "a", Typeflag: tar.TypeSymlink, Linkname: "../a"}), "links inside"},
		"absolute link":          {archiveOf(t, tar.Header{Name: "a", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}), "links inside"},
		"gzip":                   {[]byte("\x1f\x8b\x08..."), "`gzip -d`"},
		"garbage":                {bytes.Repeat([]byte("garbage "), 1000), "expected a tar archive"},
		"cut off":                {good[:40_000], "unexpected EOF"},
		"too many files":         {many, "at most 10000 files"},
		"short and no tar":       {[]byte("hello"), "unexpected EOF"},
		"a name with a newline ": {archiveOf(t, tar.Header{Name: "/a\nb"}), `found "/a\nb"`},
	} {
		t.Run(name, func(t *testing.T) {
			checked := inspect(bytes.NewReader(test.archive))
			read, err := io.ReadAll(checked)
			if test.wrong == "" && (err != nil || !bytes.Equal(read, test.archive)) {
				t.Errorf("read %d of %d bytes: %v", len(read), len(test.archive), err)
			}
			if test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)) {
				t.Errorf("%v, want %q", err, test.wrong)
			}
			if finished := checked.finish(); (finished == nil) != (test.wrong == "") {
				t.Errorf("finish returned %v", finished)
			}
		})
	}
}

// A reader that stops early, as containerd does, gets no error of the rest, and the inspection ends.
func TestInspectionEndsWithItsReader(t *testing.T) {
	checked := inspect(bytes.NewReader(archiveOf(t, tar.Header{Name: "a", Size: 1 << 20}, tar.Header{Name: "../b"})))
	if _, err := io.ReadFull(checked, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := checked.finish(); err != nil {
		t.Error(err)
	}
	if _, err := checked.Read(make([]byte, 1)); err == nil {
		t.Error("the archive can be read after its inspection")
	}
}
