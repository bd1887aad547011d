package hollow

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/host/hostpb"
)

// store keeps machines on disk:
//
//	id                         of the host
//	machines/<id>/machine.json the spec and status of a machine
//	machines/<id>/…            its bootstrap data until it is used, and its certificate
//	volumes/<id>.json          a volume
//	deleted/<id>               the id of a machine, which is not used again
//	deleted/volume.<id>        that of a volume
type store struct{ root string }

const (
	recordFile    = "machine.json"
	bootstrapFile = "bootstrap-data"
)

func (s store) dir(id string) string { return filepath.Join(s.root, "machines", id) }

func (s store) tombstone(id string) string { return filepath.Join(s.root, "deleted", id) }

// hostID creates the id at the first call.
func (s store) hostID() (string, error) {
	if err := os.MkdirAll(filepath.Join(s.root, "deleted"), 0o700); err != nil {
		return "", err
	}
	path := filepath.Join(s.root, "id")
	data, err := os.ReadFile(path)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return strings.TrimSpace(string(data)), err
	}
	id := uuid.NewString()
	return id, write(path, []byte(id+"\n"))
}

// create records a new machine. It writes the record last, so a folder without a record remains from a crash.
func (s store) create(m *hostpb.Machine, bootstrapData []byte) error {
	dir := s.dir(m.GetSpec().GetId())
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := write(filepath.Join(dir, bootstrapFile), bootstrapData); err != nil {
		return err
	}
	return s.save(m)
}

func (s store) save(m *hostpb.Machine) error {
	return record(filepath.Join(s.dir(m.GetSpec().GetId()), recordFile), m)
}

// bury removes a machine permanently.
func (s store) bury(id string) error {
	if err := write(s.tombstone(id), nil); err != nil {
		return err
	}
	return os.RemoveAll(s.dir(id))
}

func (s store) buried(id string) bool {
	_, err := os.Stat(s.tombstone(id))
	return err == nil
}

// load reads all machines. It removes the remains of machines that were deleted or not completely recorded before a crash.
func (s store) load() ([]*hostpb.Machine, error) {
	entries, err := os.ReadDir(filepath.Join(s.root, "machines"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var out []*hostpb.Machine
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(s.dir(e.Name()), recordFile))
		if errors.Is(err, fs.ErrNotExist) || s.buried(e.Name()) {
			if err := os.RemoveAll(s.dir(e.Name())); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		m := &hostpb.Machine{}
		if err := protojson.Unmarshal(data, m); err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// record writes an object to a file.
func record(path string, object proto.Message) error {
	data, err := protojson.Marshal(object)
	if err != nil {
		return err
	}
	return write(path, data)
}

// write replaces a file as a whole. Only root can read the file, because it can contain secrets.
func write(path string, data []byte) error {
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
