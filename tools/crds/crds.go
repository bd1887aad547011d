// Package crds pins the modules whose custom resource definitions tests install: cert-manager and Cluster API Operator. The tests
// read the files of the modules; no code of them is built.
package crds

import (
	_ "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	_ "sigs.k8s.io/cluster-api-operator/api/v1alpha2"
)
