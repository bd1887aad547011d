package versions

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/atomicfile"
)

// Source has programs of a version.
type Source struct {
	// Location is a folder, an archive (.tar.gz), or the http or https URL of an archive.
	Location string
	// SHA256 of the archive, in hexadecimal digits. URLs need it.
	SHA256 string
	// CAFile has the certificates that sign the server's certificate, in PEM; empty for those of this host.
	CAFile string
}

// Limits of a source.
type Limits struct {
	// Archive is the largest size of an archive, Unpacked that of its content, Program that of one program.
	Archive, Unpacked, Program int64
	// Entries is the largest number of entries of an archive or a folder.
	Entries int
}

// DefaultLimits admit upstream's archives, which also contain images and sources, several times over.
var DefaultLimits = Limits{Archive: 2 << 30, Unpacked: 8 << 30, Program: 1 << 30, Entries: 100_000}

func (s *Store) limits() Limits {
	if s.Limits == (Limits{}) {
		return DefaultLimits
	}
	return s.Limits
}

var sha256Text = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Check reports a source that cannot be used as it is written.
func (s Source) Check() error {
	if s.SHA256 != "" && !sha256Text.MatchString(s.SHA256) {
		return fmt.Errorf("expected a SHA-256 of 64 lower case hexadecimal digits, found %q", s.SHA256)
	}
	if !s.remote() {
		return nil
	}
	if u, err := url.Parse(s.Location); err != nil || u.Host == "" {
		return fmt.Errorf("expected an URL such as https://mirror.example.com/kubernetes.tar.gz, found %q", s.Location)
	}
	if s.SHA256 == "" {
		return fmt.Errorf("expected the SHA-256 of %s, found none: add --sha256 with the checksum that the publisher states", s.Location)
	}
	return nil
}

func (s Source) remote() bool {
	return strings.HasPrefix(s.Location, "http://") || strings.HasPrefix(s.Location, "https://")
}

// unpack copies the programs of the source into the folder out. The file fetched is for its own use.
func (s Source) unpack(ctx context.Context, fetched, out, version string, limits Limits) error {
	if err := s.Check(); err != nil {
		return err
	}
	if s.remote() {
		return s.archive(ctx, s.download, fetched, out, version, limits)
	}
	info, err := os.Stat(s.Location)
	if err != nil {
		return err
	}
	switch {
	case info.Mode().IsRegular():
		return s.archive(ctx, s.open, fetched, out, version, limits)
	case !info.IsDir():
		return fmt.Errorf("expected a folder, an archive (.tar.gz) or an URL, found %s", info.Mode().Type())
	case s.SHA256 != "":
		return errors.New("expected --sha256 for an archive only, found a folder")
	}
	root, err := os.OpenRoot(s.Location)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return unpackFolder(root, out, limits)
}

// archive fetches the archive, checks its checksum, and then unpacks it.
func (s Source) archive(ctx context.Context, open func(context.Context) (io.ReadCloser, error), fetched, out, version string, limits Limits) error {
	r, err := open(ctx)
	if err != nil {
		return err
	}
	sum, err := save(r, fetched, limits.Archive)
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	if s.SHA256 != "" && sum != s.SHA256 {
		return fmt.Errorf("expected an archive with the SHA-256 %s, found %s: fetch the archive again, or correct --sha256", s.SHA256, sum)
	}
	return errors.Join(unpackArchive(fetched, out, version, limits), os.Remove(fetched))
}

func (s Source) open(context.Context) (io.ReadCloser, error) { return os.Open(s.Location) }

func (s Source) download(ctx context.Context) (io.ReadCloser, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if s.CAFile != "" {
		pool, err := cert.NewPool(s.CAFile)
		if err != nil {
			return nil, fmt.Errorf("expected certificates in PEM in %s: %w", s.CAFile, err)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Location, nil)
	if err != nil {
		return nil, err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		_ = response.Body.Close()
		return nil, fmt.Errorf("expected status 200 of the server, found %s", response.Status)
	}
	return response.Body, nil
}

// save writes a stream of at most limit bytes to a new file, and returns its SHA-256.
func save(r io.Reader, file string, limit int64) (string, error) {
	out, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	n, err := io.Copy(io.MultiWriter(out, hash), io.LimitReader(r, limit+1))
	if err == nil && n > limit {
		err = fmt.Errorf("expected an archive of at most %d bytes, found a larger one", limit)
	}
	return hex.EncodeToString(hash.Sum(nil)), errors.Join(err, out.Close())
}

// entry is a file of a source that can become a program.
type entry struct {
	name string
	// link is the target of a symbolic link; empty for a file.
	link string
	size int64
}

// chosen returns which entries of a folder to copy: the programs, and the files to which they link. A link may only lead to a file of
// the same folder.
func chosen(entries map[string]entry, limits Limits) (map[string]bool, error) {
	out := map[string]bool{}
	for _, name := range slices.Concat(WorkerPrograms, ControlPlanePrograms) {
		e, found := entries[name]
		if !found {
			continue
		}
		out[name] = true
		if e.link != "" {
			target := entries[e.link]
			if path.Base(e.link) != e.link || target.name == "" || target.link != "" {
				return nil, fmt.Errorf("expected that %s is a file, or a link to a file of its folder, found a link to %q", name, e.link)
			}
			e = target
			out[e.name] = true
		}
		if e.size > limits.Program {
			return nil, fmt.Errorf("expected programs of at most %d bytes, found %s with %d bytes", limits.Program, e.name, e.size)
		}
	}
	if len(out) == 0 {
		return nil, errors.New("expected programs such as kubelet, found none")
	}
	return out, nil
}

// unpackFolder copies the programs of a folder. Nothing outside of root is read.
func unpackFolder(root *os.Root, out string, limits Limits) error {
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	names, err := dir.Readdirnames(limits.Entries + 1)
	if err := errors.Join(ignoreEOF(err), dir.Close()); err != nil {
		return err
	}
	if len(names) > limits.Entries {
		return fmt.Errorf("expected a folder of at most %d files, found more", limits.Entries)
	}
	entries := map[string]entry{}
	for _, name := range names {
		info, err := root.Lstat(name)
		switch {
		case err != nil:
			return err
		case info.Mode().IsRegular():
			entries[name] = entry{name: name, size: info.Size()}
		case info.Mode().Type() == os.ModeSymlink:
			link, err := root.Readlink(name)
			if err != nil {
				return err
			}
			entries[name] = entry{name: name, link: link}
		}
	}
	copied, err := chosen(entries, limits)
	if err != nil {
		return err
	}
	for name := range copied {
		if err := copyEntry(root, entries[name], out, limits.Program); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func copyEntry(root *os.Root, e entry, out string, limit int64) error {
	if e.link != "" {
		return link(e, out)
	}
	in, err := root.Open(e.name)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	return write(in, e.name, info.Mode()&0o111 != 0, out, limit)
}

// link creates a link to a file of the same folder.
func link(e entry, out string) error { return os.Symlink(e.link, filepath.Join(out, e.name)) }

// write creates a program durably. Its owner is the user of this process.
func write(r io.Reader, name string, executable bool, out string, limit int64) error {
	mode := os.FileMode(0o644)
	if executable {
		mode = 0o755
	}
	file, err := os.OpenFile(filepath.Join(out, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(file, io.LimitReader(r, limit+1))
	if err == nil && n > limit {
		err = fmt.Errorf("expected a program of at most %d bytes, found a larger one", limit)
	}
	return errors.Join(err, file.Chmod(mode), file.Sync(), file.Close(), atomicfile.SyncDir(out))
}
