package localvolume

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/testenv/expect"
)

const uid = "01234567-89ab-cdef-0123-456789abcdef"

func claim(request string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	class := Class
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "a", Name: "data", UID: uid, Annotations: map[string]string{StorageProvisioner: Provisioner, SelectedNode: "n"},
		},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(request)}},
		},
	}
	if change != nil {
		change(c)
	}
	return c
}

func TestWants(t *testing.T) {
	other := "other"
	for name, change := range map[string]func(*corev1.PersistentVolumeClaim){
		"no node selected":  func(c *corev1.PersistentVolumeClaim) { delete(c.Annotations, SelectedNode) },
		"another node":      func(c *corev1.PersistentVolumeClaim) { c.Annotations[SelectedNode] = "m" },
		"another class":     func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &other },
		"no class":          func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = nil },
		"no provisioner":    func(c *corev1.PersistentVolumeClaim) { delete(c.Annotations, StorageProvisioner) },
		"bound":             func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v" },
		"is being deleted ": func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = &metav1.Time{} },
	} {
		if Wants(claim("1Gi", change), "n") {
			t.Errorf("%s: the node provides a volume", name)
		}
	}
	if !Wants(claim("1Gi", nil), "n") {
		t.Error("the node does not provide the volume")
	}
}

func TestCheck(t *testing.T) {
	block := corev1.PersistentVolumeBlock
	for _, c := range []struct {
		name     string
		claim    *corev1.PersistentVolumeClaim
		promised int64
		want     string
	}{
		{"all that is free", claim("4Gi", nil), 4 << 30, ""},
		{"more than is free", claim("4097Mi", nil), 0, "expected at most 4Gi, found a request for 4097Mi"},
		{"the reserve of the machine", claim("6Gi", nil), 0, "2Gi are reserved for the services of the machine"},
		{"the eviction of the kubelet", claim("4Gi", nil), 0, "expected at most 1Gi, found a request for 4Gi"},
		{"what another volume has not written", claim("4Gi", nil), 1 << 30, "expected at most 3Gi, found a request for 4Gi"},
		{"more than is not promised", claim("2Gi", nil), 7 << 30, "expected at most 1Gi, found a request for 2Gi"},
		{"more is promised than the disk has", claim("1", nil), 11 << 30, "expected at most 0, found a request for 1"},
		{"more than a number holds", claim("10E", nil), 0, "expected at most 4Gi"},
		{"nothing", claim("0", nil), 0, "larger than 0"},
		{"a path as UID", claim("1Gi", func(c *corev1.PersistentVolumeClaim) { c.UID = "../../../../etc" }), 0, "pvc-UID"},
		{"block", claim("1Gi", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = &block }), 0, ""},
		{"large block", claim("5Gi", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = &block }), 0, "expected at most 4Gi"},
		{"shared", claim("1Gi", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
		}), 0, "ReadWriteMany"},
		{"one pod", claim("1Gi", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
		}), 0, ""},
		{"selector", claim("1Gi", func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} }), 0, "spec.selector"},
		{"clone", claim("1Gi", func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "x"}
		}), 0, "spec.dataSource"},
	} {
		disk := Disk{Total: 10 << 30, Free: 6 << 30}
		if c.name == "what another volume has not written" {
			disk.Unwritten = 1 << 30
		}
		if c.name == "the eviction of the kubelet" {
			disk.Eviction = 4 << 30
		}
		err := Check(c.claim, disk, c.promised)
		if (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// TestNode: only volumes that an agent can have created have a node. Others are never removed.
func TestNode(t *testing.T) {
	for name, change := range map[string]func(*corev1.PersistentVolume){
		"another path":           func(v *corev1.PersistentVolume) { v.Spec.Local.Path = "/etc" },
		"path of another":        func(v *corev1.PersistentVolume) { v.Name = "pvc-" + strings.Repeat("0", 8) + uid[8:] },
		"path of a block volume": func(v *corev1.PersistentVolume) { v.Spec.Local.Path = Devices + "/" + v.Name },
		"another mode":           func(v *corev1.PersistentVolume) { *v.Spec.VolumeMode = corev1.PersistentVolumeBlock },
		"another name":           func(v *corev1.PersistentVolume) { v.Name, v.Spec.Local.Path = "..", Root+"/.." },
		"another class":          func(v *corev1.PersistentVolume) { v.Spec.StorageClassName = "x" },
		"not provisioned":        func(v *corev1.PersistentVolume) { v.Annotations = nil },
		"not local":              func(v *corev1.PersistentVolume) { v.Spec.Local = nil },
		"no affinity":            func(v *corev1.PersistentVolume) { v.Spec.NodeAffinity = nil },
		"several terms": func(v *corev1.PersistentVolume) {
			terms(v, func(t []corev1.NodeSelectorTerm) []corev1.NodeSelectorTerm { return append(t, t[0]) })
		},
		"another operator": func(v *corev1.PersistentVolume) { expression(v).Operator = corev1.NodeSelectorOpNotIn },
		"another label":    func(v *corev1.PersistentVolume) { expression(v).Key = "zone" },
		"several nodes":    func(v *corev1.PersistentVolume) { expression(v).Values = []string{"n", "m"} },
	} {
		volume := Volume(claim("1Gi", nil), "n")
		change(volume)
		if node := Node(volume); node != "" {
			t.Errorf("%s: the node is %q", name, node)
		}
	}
	block := corev1.PersistentVolumeBlock
	for _, change := range []func(*corev1.PersistentVolumeClaim){nil, func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = &block }} {
		volume := Volume(claim("1Gi", change), "n")
		if node := Node(volume); node != "n" {
			t.Errorf("the node of %s is %q", volume.Spec.Local.Path, node)
		}
		if Block(volume.Spec.VolumeMode) != (volume.Spec.Local.Path == Devices+"/pvc-"+uid) {
			t.Errorf("the volume %s has the mode %s", volume.Spec.Local.Path, *volume.Spec.VolumeMode)
		}
	}
}

func terms(v *corev1.PersistentVolume, change func([]corev1.NodeSelectorTerm) []corev1.NodeSelectorTerm) {
	required := v.Spec.NodeAffinity.Required
	required.NodeSelectorTerms = change(required.NodeSelectorTerms)
}

func expression(v *corev1.PersistentVolume) *corev1.NodeSelectorRequirement {
	return &v.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0]
}

func TestPromisedLostReleased(t *testing.T) {
	here, gone, foreign := Volume(claim("1Gi", nil), "n"), Volume(claim("2Gi", nil), "gone"), &corev1.PersistentVolume{}
	all := []*corev1.PersistentVolume{here, gone, foreign}
	if sum := Promised(all, "n"); sum != 1<<30 {
		t.Errorf("promised %d", sum)
	}
	if lost := Lost(all, []string{"n"}); len(lost) != 1 || lost[0] != gone {
		t.Errorf("lost %v", lost)
	}
	if Released(here) {
		t.Error("a volume with a claim is released")
	}
	here.Status.Phase = corev1.VolumeReleased
	if !Released(here) {
		t.Error("a volume without a claim is not released")
	}
	here.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	if Released(here) {
		t.Error("a volume that an administrator retains is released")
	}
}

// TestFolders: each operation can be repeated, and changes nothing outside of the folder of its volume.
func TestFolders(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "precious")
	expect.NoError(t, os.MkdirAll(filepath.Join(precious, "inner"), 0o755))
	f, name := Folders{Dir: filepath.Join(dir, "volumes"), Top: "/"}, "pvc-"+uid
	for range 2 {
		expect.NoError(t, f.Create(name))
	}
	volume := filepath.Join(f.Dir, name)
	if info, err := os.Stat(volume); err != nil || info.Mode().Perm() != 0o777 {
		t.Errorf("the folder of the volume: %v, %v", info, err)
	}
	if info, err := os.Stat(f.Dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder of all volumes: %v, %v", info, err)
	}
	expect.NoError(t, os.Symlink(precious, filepath.Join(volume, "escape")))
	for range 2 {
		expect.NoError(t, f.Empty(name))
	}
	if entries, err := os.ReadDir(volume); err != nil || len(entries) != 0 {
		t.Errorf("an empty volume has %v, %v", entries, err)
	}
	for range 2 {
		expect.NoError(t, f.Remove(name))
	}
	expect.NoError(t, f.Empty(name))
	if _, err := os.Stat(volume); !os.IsNotExist(err) {
		t.Errorf("the folder remains: %v", err)
	}
	expect.NoError(t, os.Symlink(precious, volume))
	if f.Create(name) == nil {
		t.Error("a link is the folder of a volume")
	}
	expect.NoError(t, f.Empty(name))
	if f.Limit(name, 1<<20) == nil {
		t.Error("a link has a limit")
	}
	expect.NoError(t, f.Remove(name))
	for _, bad := range []string{"", ".", "..", "../precious", "precious", name + "/..", name + "/", strings.ToUpper(name), name + "\n"} {
		if f.Create(bad) == nil || f.Empty(bad) == nil || f.Limit(bad, 1) == nil || f.Unlimit(bad) == nil || f.Remove(bad) == nil {
			t.Errorf("%q is a volume", bad)
		}
	}
	if _, err := os.Stat(filepath.Join(precious, "inner")); err != nil {
		t.Error("data outside of the volume is gone")
	}
	disk, err := f.Disk()
	if err != nil || disk.Total <= 0 || disk.Free < 0 || disk.Free > disk.Total {
		t.Errorf("disk %+v, %v", disk, err)
	}
}

// A volume goes however deep and wide its folders are: with 500 open files, and with 3000 folders in each other, and 3000 beside each
// other with names that the removal uses itself.
func TestDeepVolume(t *testing.T) {
	f, name := Folders{Dir: filepath.Join(t.TempDir(), "volumes"), Top: "/"}, "pvc-"+uid
	expect.NoError(t, f.Create(name))
	root, err := os.OpenRoot(filepath.Join(f.Dir, name))
	expect.NoError(t, err)
	for n := range 3000 {
		expect.NoError(t, root.Mkdir(fmt.Sprintf(".moved-%d", n), 0o700))
	}
	expect.NoError(t, root.WriteFile(".moved-3000", nil, 0o600))
	for range 3000 {
		expect.NoError(t, root.Mkdir("x", 0o700))
		inner, err := root.OpenRoot("x")
		expect.NoError(t, err)
		expect.NoError(t, root.Close())
		root = inner
	}
	expect.NoError(t, root.WriteFile("file", nil, 0o600))
	expect.NoError(t, root.Close())
	var limit unix.Rlimit
	expect.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	expect.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 500, Max: limit.Max}))
	defer func() { expect.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)) }()
	expect.NoError(t, f.Remove(name))
	if _, err := os.Stat(filepath.Join(f.Dir, name)); !os.IsNotExist(err) {
		t.Errorf("the folder remains: %v", err)
	}
}

// TestVolumesOfOthersStay: a pod that replaces the folders of its volume by links, while the volume is being emptied, cannot lead the
// removal to the volume of another pod.
func TestVolumesOfOthersStay(t *testing.T) {
	f, name := Folders{Dir: filepath.Join(t.TempDir(), "volumes"), Top: "/"}, "pvc-"+uid
	other := "pvc-" + strings.Repeat("0", 8) + uid[8:]
	expect.NoError(t, f.Create(other))
	precious := filepath.Join(f.Dir, other, "precious")
	expect.NoError(t, os.WriteFile(precious, nil, 0o600))
	expect.NoError(t, f.Create(name))
	volume := filepath.Join(f.Dir, name)
	for n := range 100 {
		expect.NoError(t, os.Mkdir(filepath.Join(volume, strconv.Itoa(n)), 0o700))
	}
	folders := listed(t, volume) // in the order of the removal
	for n := range 2000 {
		expect.NoError(t, os.WriteFile(filepath.Join(volume, folders[0], strconv.Itoa(n)), nil, 0o600))
	}
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	expect.NoError(t, err)
	_, err = unix.InotifyAddWatch(watch, filepath.Join(volume, folders[0]), unix.IN_DELETE)
	expect.NoError(t, err)
	done, replaced := make(chan struct{}), 0
	go func() {
		defer close(done)
		_, _ = unix.Read(watch, make([]byte, 4096)) // until the removal has begun
		for _, folder := range folders[1:] {
			path := filepath.Join(volume, folder)
			if unix.Rmdir(path) == nil && os.Symlink("../"+other, path) == nil {
				replaced++
			}
		}
	}()
	_ = f.Empty(name) // It can fail: the next attempt continues.
	<-done
	expect.NoError(t, unix.Close(watch))
	expect.NoError(t, f.Empty(name))
	if _, err := os.Lstat(precious); err != nil || replaced == 0 {
		t.Fatalf("a file of another volume is gone after %d folders became links: %v", replaced, err)
	}
}

func listed(t *testing.T, dir string) []string {
	t.Helper()
	open, err := os.Open(dir)
	expect.NoError(t, err)
	names, err := open.Readdirnames(-1)
	expect.NoError(t, errors.Join(err, open.Close()))
	return names
}

// TestImages: the file of a block volume has its name only when it is complete, and no link leads to another file.
func TestImages(t *testing.T) {
	dir := t.TempDir()
	f, name := Folders{Dir: filepath.Join(dir, "blocks"), Top: "/"}, "pvc-"+uid
	folder := filepath.Join(f.Dir, name)
	precious := filepath.Join(dir, "precious")
	expect.NoError(t, os.WriteFile(precious, []byte("data"), 0o600))
	expect.NoError(t, os.MkdirAll(folder, 0o700))
	expect.NoError(t, os.Symlink(precious, filepath.Join(folder, "disk.new")))
	if err := f.CreateImage(name, 1<<20); err == nil {
		t.Error("a link is the file of a volume")
	}
	expect.NoError(t, os.Remove(filepath.Join(folder, "disk.new")))
	if err := f.CreateImage(name, 1<<60); err == nil {
		t.Error("a volume is larger than the disk")
	}
	if names, err := f.Images(); err != nil || len(names) != 0 {
		t.Errorf("incomplete volumes: %v, %v", names, err)
	}
	expect.NoError(t, f.CreateImage(name, 1<<20))
	expect.NoError(t, f.CreateImage(name, 1<<30)) // It exists.
	image, err := f.OpenImage(name)
	expect.NoError(t, err)
	var st unix.Stat_t
	expect.NoError(t, errors.Join(unix.Fstat(int(image.Fd()), &st), image.Close()))
	if st.Size != 1<<20 || st.Blocks*512 < 1<<20 || st.Mode != unix.S_IFREG|0o600 {
		t.Errorf("the file has %d bytes, %d blocks and the mode %o", st.Size, st.Blocks, st.Mode)
	}
	expect.NoError(t, os.MkdirAll(filepath.Join(f.Dir, "other", "disk"), 0o700))
	if names, err := f.Images(); err != nil || len(names) != 1 || names[0] != name {
		t.Errorf("the volumes are %v, %v", names, err)
	}
	expect.NoError(t, os.Remove(filepath.Join(folder, "disk")))
	expect.NoError(t, os.Symlink(precious, filepath.Join(folder, "disk")))
	if _, err := f.OpenImage(name); err == nil {
		t.Error("a link is the file of a volume")
	}
	expect.NoError(t, f.Remove(name))
	if data, err := os.ReadFile(precious); err != nil || string(data) != "data" {
		t.Errorf("a file outside has %q, %v", data, err)
	}
}

// TestUnwritten: what a block volume has discarded stays its space. A volume that is made again does not need its space twice.
func TestUnwritten(t *testing.T) {
	f := Folders{Dir: filepath.Join(t.TempDir(), "volumes"), Top: "/"}
	expectUnwritten := func(block bool, want int64) {
		t.Helper()
		if got, err := f.Unwritten(block); err != nil || got != want {
			t.Errorf("%d bytes are not written, want %d: %v", got, want, err)
		}
	}
	expectTaken := func(name string, want int64) {
		t.Helper()
		if got, err := f.Taken(name, true); err != nil || got != want {
			t.Errorf("%s has taken %d bytes, want %d: %v", name, got, want, err)
		}
	}
	expectUnwritten(true, 0)
	full, discarded := "pvc-"+uid, "pvc-"+strings.Repeat("0", 8)+uid[8:]
	for _, name := range []string{full, discarded} {
		expectTaken(name, 0)
		expect.NoError(t, f.CreateImage(name, 1<<20))
	}
	image, err := f.OpenImage(discarded)
	expect.NoError(t, err)
	expect.NoError(t, errors.Join(unix.Fallocate(int(image.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 256<<10), image.Close()))
	expectUnwritten(true, 256<<10)
	expectTaken(full, 1<<20)
	expectTaken(discarded, 1<<20)
	expectUnwritten(false, 0)
}
