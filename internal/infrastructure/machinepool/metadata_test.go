package machinepool

import (
	"maps"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// MP-02: labels and annotations of the template are added to and removed from machines in place.
func TestMetadataFollowsTheTemplate(t *testing.T) {
	type set = map[string]string
	const record = infrav1.MachineTemplateMetadataAnnotation
	of := func(labels, annotations set) metadata {
		p := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Name: "p", Labels: set{clusterv1.WatchLabel: "us"}}}
		p.Spec.MachineTemplate.ObjectMeta = clusterv1.ObjectMeta{Labels: labels, Annotations: annotations}
		mp := &clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Name: "mp"}}
		mp.Spec.ClusterName = "c"
		return templateMetadata(&scope{pool: p, machinePool: mp})
	}
	with := func(labels set) set {
		out := set{clusterv1.ClusterNameLabel: "c", clusterv1.MachinePoolNameLabel: "mp", infrav1.MachinePoolLabel: "p", clusterv1.WatchLabel: "us"}
		maps.Copy(out, labels)
		return out
	}
	for name, tc := range map[string]struct {
		have, template, want metadata
	}{
		"new machine": {
			metadata{}, of(set{"team": "one"}, set{"note": "x"}),
			metadata{with(set{"team": "one"}), set{"note": "x", record: `{"labels":["team"],"annotations":["note"]}`}},
		},
		"changed": {
			metadata{set{"team": "one"}, set{record: `{"labels":["team"]}`}}, of(set{"team": "two"}, nil),
			metadata{with(set{"team": "two"}), set{record: `{"labels":["team"]}`}},
		},
		"removed, and what is somebody else's stays": {
			metadata{set{"team": "one", "theirs": "a"}, set{"note": "x", "also": "b", record: `{"labels":["team"],"annotations":["note"]}`}}, of(nil, nil),
			metadata{with(set{"theirs": "a"}), set{"also": "b", record: `{}`}},
		},
		"made before there was a record": {
			metadata{set{"team": "one"}, nil}, of(nil, nil),
			metadata{with(set{"team": "one"}), set{record: `{}`}},
		},
		"the template cannot take what core needs": {
			metadata{}, of(set{clusterv1.ClusterNameLabel: "other"}, nil),
			metadata{with(nil), set{record: `{"labels":["` + clusterv1.ClusterNameLabel + `"]}`}},
		},
	} {
		got := tc.have.follow(tc.template)
		if !maps.Equal(got.labels, tc.want.labels) || !maps.Equal(got.annotations, tc.want.annotations) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
		if again := got.follow(tc.template); !maps.Equal(got.labels, again.labels) || !maps.Equal(got.annotations, again.annotations) {
			t.Errorf("%s: a second call changes it to %v", name, again)
		}
	}
}

// TestLabelsOfAnyName (MP-02): machines of pools with any name have valid labels, also if the name is shortened.
func TestLabelsOfAnyName(t *testing.T) {
	for length := 1; length <= 253; length++ {
		for dash := range max(length-1, 1) {
			name := []byte(strings.Repeat("x", length))
			if dash > 0 {
				name[dash] = '-'
			}
			meta := metav1.ObjectMeta{Name: string(name)}
			labels := templateMetadata(&scope{pool: &infrav1.CapstanMachinePool{ObjectMeta: meta}, machinePool: &clusterv1.MachinePool{ObjectMeta: meta}}).labels
			for _, key := range []string{clusterv1.MachinePoolNameLabel, infrav1.MachinePoolLabel} {
				if problems := validation.IsValidLabelValue(labels[key]); len(problems) > 0 || labels[key] == "" {
					t.Fatalf("%s: %s is %q: %v", name, key, labels[key], problems)
				}
			}
		}
	}
}
