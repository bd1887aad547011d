package agent

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/localvolume"
)

// TestUnfinishedVolume: the data of a claim that goes before it has a PersistentVolume goes too, and only then.
func TestUnfinishedVolume(t *testing.T) {
	for name, lost := range map[string]bool{"the API server refuses the PersistentVolume": false, "its answer is lost": true} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
				kube.PersistentVolumes: "PersistentVolumeList", kube.Events: "EventList",
			})
			client.PrependReactor("create", "persistentvolumes", func(action clienttesting.Action) (bool, runtime.Object, error) {
				if lost {
					must(t, client.Tracker().Create(kube.PersistentVolumes, action.(clienttesting.CreateAction).GetObject(), ""))
				}
				return true, nil, errors.New("no answer")
			})
			a := &agent{name: "n", log: slog.New(slog.NewTextHandler(t.Output(), nil))}
			v := &volumes{
				agent: a, client: client, events: newEvents(a, client),
				folders:    localvolume.Folders{Dir: filepath.Join(dir, "volumes"), Top: dir},
				unfinished: map[string]*corev1.PersistentVolumeMode{},
				known:      cache.NewStore(cache.MetaNamespaceKeyFunc), claims: cache.NewStore(cache.MetaNamespaceKeyFunc),
			}
			claim := &corev1.PersistentVolumeClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "data", UID: "00000000-0000-4000-8000-00000000000a", Annotations: map[string]string{
					localvolume.StorageProvisioner: localvolume.Provisioner, localvolume.SelectedNode: "n",
				}},
				Spec: corev1.PersistentVolumeClaimSpec{
					StorageClassName: ptr.To(localvolume.Class), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}},
				},
			}
			folder := filepath.Join(v.folders.Dir, localvolume.Name(claim))
			must(t, v.claims.Add(claim))
			if err := v.sync(t.Context()); err == nil {
				t.Error("the creation has an answer")
			}
			if _, err := os.Stat(folder); err != nil {
				t.Fatal(err)
			}
			must(t, v.claims.Delete(claim))
			must(t, v.sync(t.Context()))
			if _, err := os.Stat(folder); (err == nil) != lost {
				t.Errorf("the folder, whose PersistentVolume exists %v: %v", lost, err)
			}
		})
	}
}

// Without an answer about the limits of the disk, no volume is created without limits, and no folder is removed, because it is the
// record of the limits. The agent tries again.
func TestVolumeWithUnknownLimits(t *testing.T) {
	const a, b = "pvc-00000000-0000-4000-8000-00000000000a", "pvc-00000000-0000-4000-8000-00000000000b"
	dir := t.TempDir()
	v := &volumes{folders: localvolume.Folders{Dir: filepath.Join(dir, "volumes"), Top: dir}}
	must(t, v.create(t.Context(), a, 1<<20))
	must(t, v.removeFolder(t.Context(), a))

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
