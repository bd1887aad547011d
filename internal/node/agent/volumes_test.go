package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/localvolume"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/wakeup"
)

// TestUnfinishedVolume: the data of a claim that goes before it has a PersistentVolume goes too, and only then. A new agent does it if the
// first one ends.
func TestUnfinishedVolume(t *testing.T) {
	for name, test := range map[string]struct{ lost, killed bool }{
		"the API server refuses the PersistentVolume": {false, false},
		"its answer is lost":                          {true, false},
		"the agent is killed":                         {false, true},
		"its answer is lost, and the agent is killed": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			v := testVolumes(t, test.lost)
			claim := testClaim()
			folder := filepath.Join(v.folders.Dir, localvolume.Name(claim))
			expect.NoError(t, v.claims.Add(claim))
			if err := v.sync(t.Context(), claim.Namespace); err == nil {
				t.Error("the creation has an answer")
			}
			if _, err := os.Stat(folder); err != nil {
				t.Fatal(err)
			}
			if test.killed {
				v = &volumes{agent: v.agent, client: v.client, events: v.events, folders: v.folders, blocks: v.blocks, known: v.known, claims: v.claims}
			}
			expect.NoError(t, v.claims.Delete(claim))
			expect.NoError(t, v.sync(t.Context(), noNamespace))
			if _, err := os.Stat(folder); (err == nil) != test.lost {
				t.Errorf("the folder, whose PersistentVolume exists %v: %v", test.lost, err)
			}
			if names, err := v.folders.Unfinished(); err != nil || len(names) > 0 {
				t.Errorf("the record remains: %v, %v", names, err)
			}
		})
	}
}

// A claim can select two nodes, one after the other. The node that does not provide its PersistentVolume removes its data.
func TestVolumeOfAnotherNode(t *testing.T) {
	for name, asked := range map[string]bool{"the node asks for the PersistentVolume as well": true, "its request is lost": false} {
		t.Run(name, func(t *testing.T) {
			v, claim := testVolumes(t, false), testClaim()
			if asked {
				answer(v)
			}
			volume := localvolume.Volume(claim, "other")
			fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(volume)
			expect.NoError(t, err)
			expect.NoError(t, v.client.(*dynamicfake.FakeDynamicClient).Tracker().Create(kube.PersistentVolumes, &unstructured.Unstructured{Object: fields}, ""))
			expect.NoError(t, v.claims.Add(claim))
			if err := v.sync(t.Context(), claim.Namespace); err == nil {
				t.Error("the PersistentVolume of another node counts as that of this node")
			}
			expect.NoError(t, v.known.Add(volume))
			expect.NoError(t, v.sync(t.Context(), noNamespace))
			if _, err := os.Stat(filepath.Join(v.folders.Dir, localvolume.Name(claim))); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the folder remains: %v", err)
			}
			if names, err := v.folders.Unfinished(); err != nil || len(names) > 0 {
				t.Errorf("the record remains: %v, %v", names, err)
			}
		})
	}
}

// The error about a PersistentVolume that exists already names its node. None is no error for that of this node.
func TestPersistentVolumeExists(t *testing.T) {
	unknown := localvolume.Volume(testClaim(), "n")
	unknown.Annotations = nil
	for name, test := range map[string]struct {
		volume *corev1.PersistentVolume
		want   string
	}{
		"of this node":      {localvolume.Volume(testClaim(), "n"), ""},
		"of another node":   {localvolume.Volume(testClaim(), "other"), "found one of node other:"},
		"of no node":        {unknown, "that no node has provided"},
		"deleted meanwhile": {nil, "was deleted while the node provided it"},
	} {
		t.Run(name, func(t *testing.T) {
			v, claim := testVolumes(t, false), testClaim()
			client := v.client.(*dynamicfake.FakeDynamicClient)
			client.PrependReactor("create", "persistentvolumes", func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewAlreadyExists(kube.PersistentVolumes.GroupResource(), localvolume.Name(claim))
			})
			if test.volume != nil {
				fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(test.volume)
				expect.NoError(t, err)
				expect.NoError(t, client.Tracker().Create(kube.PersistentVolumes, &unstructured.Unstructured{Object: fields}, ""))
			}
			if err := v.createVolume(t.Context(), claim); (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}

// A volume whose PersistentVolume was made is not unfinished: without the PersistentVolume, for example after a restore of etcd, its data
// stays.
func TestFinishedVolume(t *testing.T) {
	v, claim := testVolumes(t, false), testClaim()
	answer(v)
	expect.NoError(t, v.claims.Add(claim))
	expect.NoError(t, v.sync(t.Context(), claim.Namespace))
	expect.NoError(t, v.claims.Delete(claim))
	expect.NoError(t, v.client.Resource(kube.PersistentVolumes).Delete(t.Context(), localvolume.Name(claim), metav1.DeleteOptions{}))
	expect.NoError(t, v.sync(t.Context(), noNamespace))
	if _, err := os.Stat(filepath.Join(v.folders.Dir, localvolume.Name(claim))); err != nil {
		t.Error(err)
	}
}

// The removal of a volume of one namespace can last long. The claims of another namespace get their volumes meanwhile.
func TestNamespacesDoNotWait(t *testing.T) {
	v := testVolumes(t, false)
	answer(v)
	asked, withdraw := slowInit(t, v)
	slow, claim := testClaim(), testClaim()
	slow.Namespace, slow.UID, slow.Spec.VolumeMode = "slow", "00000000-0000-4000-8000-00000000000b", ptr.To(corev1.PersistentVolumeBlock)
	volume := localvolume.Volume(slow, "n")
	volume.Status.Phase = corev1.VolumeReleased
	expect.NoError(t, v.known.Add(volume))
	wake := wakeup.New()
	defer running(t, v, wake)()
	defer withdraw()
	<-asked
	expect.NoError(t, v.claims.Add(claim))
	wake.Send()
	expect.Eventually(t, "the volume of the other namespace", func() error {
		_, err := v.client.Resource(kube.PersistentVolumes).Get(t.Context(), localvolume.Name(claim), metav1.GetOptions{})
		return err
	})
}

// A claim can select this node again while the data of its first attempt is removed. It gets a volume after the removal.
func TestClaimReturnsDuringRemoval(t *testing.T) {
	v, claim := testVolumes(t, false), testClaim()
	asked, withdraw := slowInit(t, v)
	claim.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock)
	expect.NoError(t, v.claims.Add(claim))
	if err := v.sync(t.Context(), claim.Namespace); err == nil {
		t.Error("the creation has an answer")
	}
	answer(v)
	expect.NoError(t, v.claims.Delete(claim))
	removed := make(chan error, 1)
	go func() { removed <- v.removeUnfinished(t.Context(), true) }()
	<-asked
	expect.NoError(t, v.claims.Add(claim))
	if err := v.sync(t.Context(), claim.Namespace); err == nil || !strings.Contains(err.Error(), "being removed") {
		t.Errorf("the claim got data that is removed: %v", err)
	}
	withdraw()
	expect.NoError(t, <-removed)
	expect.NoError(t, v.sync(t.Context(), claim.Namespace))
	_, err := v.client.Resource(kube.PersistentVolumes).Get(t.Context(), localvolume.Name(claim), metav1.GetOptions{})
	expect.NoError(t, err)
}

// While a machine has no Node, agents of control plane machines delete the PersistentVolumes of claims that are gone. The data goes too.
// That of other volumes stays.
func TestVolumeThatOthersDelete(t *testing.T) {
	v := testVolumes(t, false)
	answer(v)
	api := v.client.Resource(kube.PersistentVolumes)
	names := map[corev1.PersistentVolumePhase]string{}
	for n, phase := range []corev1.PersistentVolumePhase{corev1.VolumeBound, corev1.VolumeReleased} {
		claim := testClaim()
		claim.UID = types.UID(fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", n))
		volume := localvolume.Volume(claim, "n")
		volume.Status.Phase = phase
		names[phase] = volume.Name
		expect.NoError(t, v.folders.Create(volume.Name))
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(volume)
		expect.NoError(t, err)
		_, err = api.Create(t.Context(), &unstructured.Unstructured{Object: fields}, metav1.CreateOptions{})
		expect.NoError(t, err)
	}
	wake := wakeup.New()
	expect.NoError(t, v.follow(t.Context(), wake.Send))
	for _, phase := range []corev1.PersistentVolumePhase{corev1.VolumeBound, corev1.VolumeReleased} {
		expect.NoError(t, api.Delete(t.Context(), names[phase], metav1.DeleteOptions{}))
	}
	expect.True(t, "the watch shows the deletions", func() bool { return len(v.known.ListKeys()) == 0 })
	defer running(t, v, wake)()
	expect.True(t, "the data of the released volume goes", func() bool {
		_, err := os.Stat(filepath.Join(v.folders.Dir, names[corev1.VolumeReleased]))
		return os.IsNotExist(err)
	})
	if _, err := os.Stat(filepath.Join(v.folders.Dir, names[corev1.VolumeBound])); err != nil {
		t.Error(err)
	}
}

// A claim does not get the space that another volume has, but has not written yet. Claims within a second share a measurement.
func TestSpaceOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := testVolumes(t, false)
		expect.NoError(t, v.check(testClaim()))
		const other = "pvc-00000000-0000-4000-8000-00000000000b"
		expect.NoError(t, v.blocks.Create(other))
		image := filepath.Join(v.blocks.Dir, other, "disk")
		expect.NoError(t, os.WriteFile(image, nil, 0o600))
		disk, err := v.blocks.Disk()
		expect.NoError(t, err)
		expect.NoError(t, os.Truncate(image, disk.Free))
		expect.NoError(t, v.check(testClaim()))
		time.Sleep(volumeRetry)
		if err := v.check(testClaim()); err == nil || !strings.Contains(err.Error(), "expected at most 0") {
			t.Errorf("%v", err)
		}
	})
}

// A volume that is made again needs no second space. A new volume ends the measurement that claims share.
func TestSpaceOfSameVolume(t *testing.T) {
	v, claim, other := testVolumes(t, false), testClaim(), testClaim()
	answer(v)
	expect.NoError(t, v.claims.Add(claim))
	other.UID = "00000000-0000-4000-8000-00000000000b"
	for range 2 {
		expect.NoError(t, v.sync(t.Context(), claim.Namespace))
		if !v.space.at.IsZero() {
			t.Error("the measurement is older than the volume")
		}
	}
	v.space = space{at: time.Now().Add(time.Hour), disk: localvolume.Disk{Total: 2 << 20, Free: 1 << 40}, promised: 2 << 20}
	expect.NoError(t, v.check(claim))
	if err := v.check(other); err == nil {
		t.Error("two claims get the same space")
	}
}

// testVolumes returns the volumes of a node n without claims. The API server does not answer the creation of a PersistentVolume: it has
// made it if lost is set, and refuses it otherwise.
func testVolumes(t *testing.T, lost bool) *volumes {
	t.Helper()
	dir := t.TempDir()
	client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
		kube.PersistentVolumes: "PersistentVolumeList", kube.PersistentVolumeClaims: "PersistentVolumeClaimList", kube.Events: "EventList",
	})
	client.PrependReactor("create", "persistentvolumes", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if lost {
			expect.NoError(t, client.Tracker().Create(kube.PersistentVolumes, action.(clienttesting.CreateAction).GetObject(), ""))
		}
		return true, nil, errors.New("no answer")
	})
	a := &agent{name: "n", log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	return &volumes{
		agent: a, client: client, events: newEvents(a, client),
		folders: localvolume.Folders{Dir: filepath.Join(dir, "volumes"), Top: dir},
		blocks:  localvolume.Folders{Dir: filepath.Join(dir, "blocks"), Top: dir},
		known:   cache.NewStore(cache.MetaNamespaceKeyFunc), claims: cache.NewStore(cache.MetaNamespaceKeyFunc), made: map[string]*corev1.PersistentVolumeClaim{},
	}
}

// running runs the steps of volumes until the returned function is called, which waits for the last step.
func running(t *testing.T, v *volumes, wake <-chan struct{}) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- v.run(ctx, wake) }()
	return func() {
		cancel()
		expect.NoError(t, <-ended)
	}
}

// slowInit is a PID 1 that provides each device at once. It withdraws a device after a call of withdraw. asked is closed by the first such
// request.
func slowInit(t *testing.T, v *volumes) (asked <-chan struct{}, withdraw func()) {
	t.Helper()
	socket, begun, withdrawn := filepath.Join(t.TempDir(), "init.sock"), make(chan struct{}), make(chan struct{})
	begin := sync.OnceFunc(func() { close(begun) })
	listener, err := net.Listen("unix", socket)
	expect.NoError(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/withdraw") {
			begin()
			<-withdrawn
		}
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	v.init = initapi.NewClient(socket)
	return begun, func() { close(withdrawn) }
}

// answer makes the API server answer again.
func answer(v *volumes) {
	client := v.client.(*dynamicfake.FakeDynamicClient)
	client.ReactionChain = client.ReactionChain[1:]
}

// testClaim returns a claim that wants a volume on the node n.
func testClaim() *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "data", UID: "00000000-0000-4000-8000-00000000000a", Annotations: map[string]string{
			localvolume.StorageProvisioner: localvolume.Provisioner, localvolume.SelectedNode: "n",
		}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To(localvolume.Class), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}},
		},
	}
}

// Without an answer about the limits of the disk, no volume is created without limits, and no folder is removed, because it is the
// record of the limits. The agent tries again.
func TestVolumeWithUnknownLimits(t *testing.T) {
	const a, b = "pvc-00000000-0000-4000-8000-00000000000a", "pvc-00000000-0000-4000-8000-00000000000b"
	dir := t.TempDir()
	v := &volumes{folders: localvolume.Folders{Dir: filepath.Join(dir, "volumes"), Top: dir}}
	expect.NoError(t, v.create(t.Context(), a, 1<<20))
	expect.NoError(t, v.removeFolder(t.Context(), a))

	v.folders.Top = filepath.Join(dir, "unknown")
	if err := v.create(t.Context(), b, 1<<20); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a volume without limits: %v", err)
	}
	if err := v.removeFolder(t.Context(), b); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("limits without a volume: %v", err)
	}
	if _, err := os.Stat(filepath.Join(v.folders.Dir, b)); err != nil {
		t.Error(err)
	}
}
