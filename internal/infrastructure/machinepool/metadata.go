package machinepool

import (
	"context"
	"encoding/json"
	"maps"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/labels/format"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// metadata are labels and annotations of a machine.
type metadata struct{ labels, annotations map[string]string }

// fromTemplate is the value of MachineTemplateMetadataAnnotation: keys, sorted.
type fromTemplate struct {
	Labels      []string `json:"labels,omitempty"`
	Annotations []string `json:"annotations,omitempty"`
}

// templateMetadata returns the metadata of the template for the pool's machines, and the labels by which core finds
// them.
func templateMetadata(s *scope) metadata {
	template := s.pool.Spec.MachineTemplate.ObjectMeta
	out := metadata{map[string]string{}, map[string]string{}}
	maps.Copy(out.labels, template.Labels)
	maps.Copy(out.annotations, template.Annotations)
	keys := fromTemplate{slices.Sorted(maps.Keys(template.Labels)), slices.Sorted(maps.Keys(template.Annotations))}
	if data, err := json.Marshal(keys); err == nil { // Strings can always be written.
		out.annotations[infrav1.MachineTemplateMetadataAnnotation] = string(data)
	}
	reconciling.CopyWatchLabel(out.labels, s.pool) // MP-11
	out.labels[clusterv1.ClusterNameLabel] = s.machinePool.Spec.ClusterName
	out.labels[clusterv1.MachinePoolNameLabel] = format.MustFormatValue(s.machinePool.Name)
	out.labels[infrav1.MachinePoolLabel] = format.MustFormatValue(s.pool.Name)
	return out
}

// follow returns the metadata of a machine after an update from the template: new entries are added, entries that were
// removed from the template are removed, and entries of other clients stay.
func (have metadata) follow(template metadata) metadata {
	var before fromTemplate
	// Without a valid annotation, nothing is removed.
	_ = json.Unmarshal([]byte(have.annotations[infrav1.MachineTemplateMetadataAnnotation]), &before)
	return metadata{replaced(have.labels, before.Labels, template.labels), replaced(have.annotations, before.Annotations, template.annotations)}
}

func replaced(have map[string]string, remove []string, add map[string]string) map[string]string {
	out := map[string]string{}
	maps.Copy(out, have)
	for _, key := range remove {
		delete(out, key)
	}
	maps.Copy(out, add)
	return out
}

// propagateMetadata brings labels and annotations of the template to the machines in place: no machine
// is replaced for them. It also restores lost and outdated references to the pool (ALL-11).
func (r *Reconciler) propagateMetadata(ctx context.Context, s *scope) error {
	template, ref := templateMetadata(s), poolReference(s.pool)
	behind := slices.DeleteFunc(slices.Clone(s.members), func(m member) bool {
		have := metadata{m.capstan.Labels, m.capstan.Annotations}
		want := have.follow(template)
		return maps.Equal(have.labels, want.labels) && maps.Equal(have.annotations, want.annotations) &&
			(util.HasExactOwnerRef(m.capstan.OwnerReferences, ref) || m.leaving())
	})
	return forEach(behind, func(m member) error {
		changed := m.capstan.DeepCopy()
		want := metadata{changed.Labels, changed.Annotations}.follow(template)
		changed.Labels, changed.Annotations = want.labels, want.annotations
		if !m.leaving() {
			changed.OwnerReferences = util.EnsureOwnerRef(changed.OwnerReferences, ref)
		}
		// Core writes the list of owner references too, and a merge patch replaces it as a whole.
		return client.IgnoreNotFound(r.Client.Patch(ctx, changed, client.MergeFromWithOptions(m.capstan, client.MergeFromWithOptimisticLock{})))
	})
}
