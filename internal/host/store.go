package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/clearfolder"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/version"
)

// store is capstand's memory:
//
//	host-id
//	version                           the newest version of Capstan that has had this store
//	contacts.json                     when a manager of each management cluster was last connected
//	fencing.json                      after how many seconds without contact machines stop, by management cluster
//	networks/<id>/spec.json
//	networks/<id>/peers.json          its machines on other hosts
//	networks/<id>/services.json       the Services of the cluster that the host publishes
//	balancers/<id>/spec.json          and the balancer's own folder in memory, shared/
//	machines/<id>/spec.json           the desired machine
//	machines/<id>/state.json          its state
//	machines/<id>/bootstrap-data      until it was used
//	machines/<id>/fenced              if the machine was stopped by fencing and no manager has confirmed it
//	machines/<id>/update.json         its last update in place: both specs and the result
//	machines/<id>/update-data         until the update has ended
//	machines/<id>/{rootfs,bundle,views,init.log}
//	run/<id>/                         shared with the machine, in memory and created at each start
//	runc/                             runc's own state
//	volumes/<id>/spec.json            a volume that outlives machines
//	volumes/<id>/{disk.img,content}   its file system, and where it is mounted
//	tombstones/machine.<id>           machines deleted within the last day
//	tombstones/volume.<id>            volumes deleted within the last day
//	tombstones/<id>                   either of them, from a former capstand
//	backups/<namespace>/<cluster>     backups of etcd; see Config.Backups
//	images/                           images of machines, from the administrator; see Config.Images
//	container-images/                 archives for the machines, from the administrator; see Config.ContainerImages
//	unpacked/<digest>                 the content of those that are archives
//	new/, trash/                      folders on their way in and out
//
// An object appears and disappears by the rename of its folder. Ids are checked before they become
// part of a path.
type store struct{ root string }

// Folders of the store.
const (
	networksDir   = "networks"
	balancersDir  = "balancers"
	machinesDir   = "machines"
	volumesDir    = "volumes"
	tombstonesDir = "tombstones"
	newDir        = "new"
	trashDir      = "trash"
	runDir        = "run"
	unpackedDir   = "unpacked"
)

// tombstoneLife is the time during which a deleted id cannot be created again, because a controller with an outdated cache
// must not bring a machine back.
const tombstoneLife = 24 * time.Hour

func (s store) path(parts ...string) string {
	return filepath.Join(append([]string{s.root}, parts...)...)
}

// open creates the folders and completes the changes that a crash interrupted.
func (s store) open() (hostID string, err error) {
	if err := os.MkdirAll(s.root, 0o711); err != nil {
		return "", err
	}
	for _, dir := range []string{networksDir, balancersDir, machinesDir, volumesDir, tombstonesDir, newDir, trashDir, runDir} {
		if err := os.MkdirAll(s.path(dir), 0o700); err != nil {
			return "", err
		}
	}
	// Remove the folders that never became objects.
	if err := s.discardAll(newDir); err != nil {
		return "", err
	}
	s.buryOld(time.Now())
	return s.hostID()
}

// checkWriter refuses the records of a newer minor release: this capstand would ignore fields that it does not know, for example the VLAN of a
// machine. Machines and load balancers continue without capstand.
func (s store) checkWriter() error {
	return version.CheckWriter(version.WriterOfHost(s.root), "the machines in "+s.root)
}

// recordWriter records the version of this capstand, unless a newer one has had the store.
func (s store) recordWriter() error {
	writer := version.WriterOfHost(s.root)
	newest := version.Newest(writer)
	if writer == newest {
		return nil
	}
	return atomicfile.WriteFile(s.path(version.HostFile), []byte(newest+"\n"), 0o644)
}

func (s store) hostID() (string, error) {
	path := s.path("host-id")
	id, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		id = []byte(uuid.NewString() + "\n")
		err = atomicfile.WriteFile(path, id, 0o644)
	}
	if err == nil && !admission.ValidID(strings.TrimSpace(string(id))) {
		err = fmt.Errorf("%s is damaged: it must contain the host's id; write the id again, as it is in status.hostID of the CapstanHost and in the folder names in /sys/fs/cgroup/*/capstan", path)
	}
	return strings.TrimSpace(string(id)), err
}

// removeTemporary removes the incomplete files of a capstand that was killed. Some contain secrets. No object is in use yet.
func (s store) removeTemporary() error {
	err := atomicfile.RemoveTemporary(s.root)
	for _, kind := range []string{networksDir, balancersDir, machinesDir, volumesDir} {
		for _, id := range folders(s.path(kind)) {
			err = errors.Join(err, atomicfile.RemoveTemporary(s.path(kind, id)))
		}
	}
	return err
}

// create creates an object's folder with its spec and secret files, completely or not at all.
func (s store) create(kind, id string, spec proto.Message, files map[string][]byte) error {
	tmp, remove, err := s.unfinished(kind, id)
	if err != nil {
		return err
	}
	defer remove() // After a success the folder has another name.
	for name, data := range files {
		if err := atomicfile.WriteFile(filepath.Join(tmp, name), data, 0o600); err != nil {
			return err
		}
	}
	if err := writeSpec(specFile(tmp), spec); err != nil {
		return err
	}
	return s.publish(tmp, kind, id)
}

// publish makes a complete folder that of an object. After an error there is no object: a caller would take one for a failure.
func (s store) publish(dir, kind, id string) error {
	to := s.path(kind, id)
	if err := os.Rename(dir, to); err != nil {
		return err
	}
	err := errors.Join(atomicfile.SyncDir(filepath.Dir(dir)), atomicfile.SyncDir(filepath.Dir(to)))
	if err != nil {
		return errors.Join(err, s.discard(to))
	}
	return nil
}

// unfinished creates an empty folder that is to become the folder of an object. remove removes it with its content.
func (s store) unfinished(kind, id string) (dir string, remove func(), err error) {
	dir = s.path(newDir, kind+"-"+id)
	return dir, func() { _ = os.RemoveAll(dir) }, errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700))
}

// specFile returns the path of the spec in the folder of an object.
func specFile(dir string) string { return filepath.Join(dir, "spec.json") }

func writeSpec(path string, spec proto.Message) error {
	data, err := protojson.MarshalOptions{Multiline: true}.Marshal(spec)
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(path, data, 0o600)
}

// readSpec reads what writeSpec has written. A later version of capstand can have written fields that this one does not know.
func readSpec(path string, into proto.Message) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, into)
}

// load reads all objects of a kind. It returns those that cannot be read, or that check refuses, by id.
func load[T proto.Message](s store, kind string, empty func() T, check func(folder string, spec T) error) (all []T, unreadable map[string]error, err error) {
	entries, err := os.ReadDir(s.path(kind))
	if err != nil {
		return nil, nil, err
	}
	unreadable = map[string]error{}
	for _, entry := range entries {
		path, spec := specFile(s.path(kind, entry.Name())), empty()
		err := readSpec(path, spec)
		if err == nil {
			err = check(entry.Name(), spec)
		}
		if err != nil {
			unreadable[entry.Name()] = fmt.Errorf("%s: %w", path, err)
			continue
		}
		all = append(all, spec)
	}
	return all, unreadable, nil
}

// discard removes a folder from the store at once. Its content is deleted later.
func (s store) discard(path string) error {
	to := s.path(trashDir, uuid.NewString())
	err := atomicfile.Rename(path, to)
	if errors.Is(err, fs.ErrPermission) {
		if err = makeChangeable(path); err == nil {
			err = atomicfile.Rename(path, to)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// makeChangeable makes a folder changeable that capstand shares with a machine.
func makeChangeable(dir string) error {
	file, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	return errors.Join(clearfolder.MakeChangeable(file), file.Close())
}

func (s store) discardAll(dir string) error {
	entries, err := os.ReadDir(s.path(dir))
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := s.discard(s.path(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// trashTime is the time of one attempt to delete a discarded folder.
const trashTime = 10 * time.Minute

// emptyTrash deletes the discarded folders until ctx ends. Errors leave a folder for the next call. Machines have written a part of the
// content.
func (s store) emptyTrash(ctx context.Context) error {
	entries, err := os.ReadDir(s.path(trashDir))
	for _, entry := range entries {
		if ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		err = errors.Join(err, clearfolder.Remove(ctx, s.path(trashDir, entry.Name()), trashTime))
	}
	return err
}

// machineTombstone returns the name of the tombstone of a machine. It is no valid id: a former capstand left a tombstone with the name of the id
// for deleted volumes too, whose ids each namespace can choose.
func machineTombstone(id string) string { return "machine." + id }

// volumeTombstone returns the name of the tombstone of a volume.
func volumeTombstone(id string) string { return "volume." + id }

// machineDeleted returns whether a machine with this id was deleted within the last day. The tombstone of a former capstand may be that of a
// volume, so it deletes no machine, but it refuses a new one.
func (s store) machineDeleted(id string, now time.Time) bool {
	return s.buried(machineTombstone(id), now) || s.buried(id, now)
}

// bury writes a tombstone. It is written before anything is removed, so an interrupted deletion continues.
func (s store) bury(tombstone string) error {
	return atomicfile.WriteFile(s.path(tombstonesDir, tombstone), nil, 0o600)
}

// buried returns whether a tombstone was written within the last day.
func (s store) buried(tombstone string, now time.Time) bool {
	info, err := os.Stat(s.path(tombstonesDir, tombstone))
	return err == nil && now.Sub(info.ModTime()) < tombstoneLife
}

// unbury removes an expired tombstone: a new machine with its id would be taken for a deleted one, also after a power failure.
func (s store) unbury(tombstone string) error {
	err := os.Remove(s.path(tombstonesDir, tombstone))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, atomicfile.SyncDir(s.path(tombstonesDir)))
}

// buryOld removes tombstones older than tombstoneLife, but none of a machine whose deletion must continue.
func (s store) buryOld(now time.Time) {
	entries, _ := os.ReadDir(s.path(tombstonesDir))
	for _, entry := range entries {
		id, ofMachine := strings.CutPrefix(entry.Name(), machineTombstone(""))
		continues := ofMachine && atomicfile.Exists(s.path(machinesDir, id))
		if !continues && !s.buried(entry.Name(), now) {
			_ = os.Remove(s.path(tombstonesDir, entry.Name()))
		}
	}
}
