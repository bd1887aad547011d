package cloudconfig

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MaxFileBytes bounds the uncompressed size of a file. The data comes from Secrets, which contain at most 1 MiB.
const MaxFileBytes = 64 << 20

// TemporarySuffix and a number follow the path of a file while a machine writes it.
const TemporarySuffix = ".capstan-tmp"

// File is a file to write, with decoded content.
type File struct {
	Path    string
	Content []byte
	// Owner as user or user:group, or empty for root.
	Owner string
	// Mode; 0644 by default.
	Mode os.FileMode
	// Append to the existing content.
	Append bool
	// Defer the file until the users exist and bootcmd has ended.
	Defer bool

	err error
}

type rawFile struct {
	Path        string    `yaml:"path"`
	Content     string    `yaml:"content"`
	Owner       string    `yaml:"owner"`
	Permissions yaml.Node `yaml:"permissions"`
	Encoding    string    `yaml:"encoding"`
	Append      bool      `yaml:"append"`
	Defer       bool      `yaml:"defer"`
}

// UnmarshalYAML implements yaml.Unmarshaler. Invalid values are kept for validate, so that one error names the problems
// of all files.
func (f *File) UnmarshalYAML(node *yaml.Node) error {
	var raw rawFile
	if err := node.Decode(&raw); err != nil {
		return err
	}
	*f = File{Path: raw.Path, Owner: raw.Owner, Append: raw.Append, Defer: raw.Defer}
	var modeErr, contentErr error
	f.Mode, modeErr = parseMode(raw.Permissions)
	f.Content, contentErr = decodeContent(raw.Content, raw.Encoding)
	f.err = errors.Join(modeErr, contentErr)
	return nil
}

func (f *File) validate() error {
	var errs []error
	if !filepath.IsAbs(f.Path) || filepath.Clean(f.Path) != f.Path {
		errs = append(errs, errors.New("path: expected an absolute path without '..'"))
	}
	if strings.ContainsAny(f.Path, "\x00\n") {
		errs = append(errs, errors.New("path: has a line break or a zero byte"))
	}
	if user, group, _ := strings.Cut(f.Owner, ":"); strings.ContainsAny(user+group, ": \t\n") {
		errs = append(errs, errors.New("owner: expected user or user:group"))
	}
	return errors.Join(append(errs, f.err)...)
}

// parseMode parses permissions as cloud-init does: a string is octal, and a number has the value that YAML defines
// (0644 and 420 are the same).
func parseMode(node yaml.Node) (os.FileMode, error) {
	if node.IsZero() || node.Tag == "!!null" || node.Value == "" {
		return 0o644, nil
	}
	var mode uint64
	var err error
	if node.Tag == "!!int" {
		var number int64
		err = node.Decode(&number)
		mode = uint64(number)
	} else {
		mode, err = strconv.ParseUint(strings.TrimPrefix(node.Value, "0o"), 8, 32)
	}
	if err != nil || mode > 0o7777 {
		return 0, errors.New("permissions: expected an octal mode such as '0640'")
	}
	out := os.FileMode(mode & 0o777)
	for bit, flag := range map[uint64]os.FileMode{0o4000: os.ModeSetuid, 0o2000: os.ModeSetgid, 0o1000: os.ModeSticky} {
		if mode&bit != 0 {
			out |= flag
		}
	}
	return out, nil
}

// decodeContent decodes content.
func decodeContent(content, encoding string) ([]byte, error) {
	var out bytes.Buffer
	n, err := decodeTo(&out, content, encoding, MaxFileBytes)
	if err == nil && n > MaxFileBytes {
		err = fmt.Errorf("content: has more than %d MiB uncompressed", MaxFileBytes>>20)
	}
	if err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// DecodedSize returns the size of content without its encoding, or limit+1 if it is larger. It fails like Parse if a machine cannot decode
// the content.
func DecodedSize(content, encoding string, limit int64) (int64, error) {
	return decodeTo(io.Discard, content, encoding, limit)
}

// decodeTo writes decoded content, of gzip at most limit+1 bytes. It accepts all of cloud-init's names of encodings.
func decodeTo(out io.Writer, content, encoding string, limit int64) (int64, error) {
	data := []byte(content)
	var isBase64, isGzip bool
	switch strings.ToLower(strings.TrimSpace(encoding)) {
	case "", "text/plain":
	case "b64", "base64":
		isBase64 = true
	case "gz", "gzip":
		isGzip = true
	case "gz+b64", "gz+base64", "gzip+b64", "gzip+base64":
		isBase64, isGzip = true, true
	default:
		return 0, fmt.Errorf("encoding: %s is not supported; use b64, gzip or gzip+b64", name(encoding))
	}
	if isBase64 {
		decoded, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(content), ""))
		if err != nil {
			return 0, errors.New("content: is not base64")
		}
		data = decoded
	}
	if !isGzip {
		n, err := out.Write(data)
		return int64(n), err
	}
	reader, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return 0, errors.New("content: is not gzip")
	}
	n, err := io.Copy(out, io.LimitReader(reader, limit+1))
	if err != nil {
		return n, errors.New("content: is damaged gzip")
	}
	return n, nil
}
