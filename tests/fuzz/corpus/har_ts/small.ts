@problemName P
@univariate false
@equalLength false
@classLabel true a b
@data
1,2,3:4,5,6:a
?,1:2,3:b
